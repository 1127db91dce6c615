// A library with one function, built several times with different values: which copy was opened?

extern "C" __attribute__((visibility("default"))) int hvd_probe_value() { return HVD_PROBE_VALUE; }
