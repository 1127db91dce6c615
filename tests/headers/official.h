// Compares our declarations of somebody else's functions with theirs.
//
// Official<T> is T with each of our types replaced by the official one that it stands for, which
// the including file names by HVD_STANDS_FOR. Where the result is not their signature to the
// letter, the file does not compile.
#pragma once

#include <type_traits>

namespace hvd::headers {

template <class Type>
struct OfficialType {
  using type = Type;
};
template <class Type>
using Official = typename OfficialType<Type>::type;

template <class Type>
struct OfficialType<Type*> {
  using type = Official<Type>*;
};
template <class Type>
struct OfficialType<const Type> {
  using type = const Official<Type>;
};
template <class Result, class... Arguments>
struct OfficialType<Result(Arguments...)> {
  using type = Official<Result>(Official<Arguments>...);
};

}  // namespace hvd::headers

// An enumeration, a struct, or a pointer to an object that nobody looks into.
#define HVD_STANDS_FOR(ours, theirs)                                                  \
  template <>                                                                         \
  struct hvd::headers::OfficialType<ours> {                                           \
    static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs), \
                  #ours " and " #theirs " have different sizes");                     \
    using type = theirs;                                                              \
  }

#define HVD_SAME_SIGNATURE(table, function)                                                     \
  static_assert(                                                                                \
      std::is_same_v<hvd::headers::Official<decltype(table::function)>, decltype(&::function)>, \
      #function " has another signature in the official header");

#define HVD_SAME_VALUE(ours, theirs)                                            \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs), \
                #ours " is not " #theirs);
