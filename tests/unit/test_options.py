import inspect
from datetime import timedelta

import pytest

from hvd_strategy.options import OPTIONS, resolve


def test_argument_beats_environment_beats_default() -> None:
    assert resolve("bucket_cap_mb", environ={}) == 25.0
    assert resolve("bucket_cap_mb", environ={"HVD_BUCKET_CAP_MB": ""}) == 25.0
    assert resolve("bucket_cap_mb", environ={"HVD_BUCKET_CAP_MB": "4"}) == 4.0
    assert resolve("bucket_cap_mb", 8, environ={"HVD_BUCKET_CAP_MB": "4"}) == 8.0
    assert resolve("bucket_cap_mb", 8, environ={"HVD_BUCKET_CAP_MB": "no number"}) == 8.0


def test_the_environment_gives_timeouts_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_TIMEOUT", " 1.5 ")
    assert resolve("timeout") == timedelta(seconds=1.5)
    assert resolve("timeout", timedelta(minutes=1)) == timedelta(minutes=1)
    assert resolve("timeout", 90) == timedelta(seconds=90)
    monkeypatch.delenv("HVD_TIMEOUT")
    assert resolve("timeout") == timedelta(minutes=30)


@pytest.mark.parametrize(
    "value", ["auto", "gloo", "nccl", "cpu:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"]
)
def test_backends(value: str) -> None:
    assert resolve("process_group_backend", value) == value
    assert resolve("process_group_backend", environ={"HVD_PROCESS_GROUP_BACKEND": value}) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket_cap_mb", 0),
        ("bucket_cap_mb", -1.0),
        ("bucket_cap_mb", float("nan")),
        ("bucket_cap_mb", float("inf")),
        ("bucket_cap_mb", True),
        ("bucket_cap_mb", "25"),
        ("timeout", "30"),
        ("timeout", 0),
        ("timeout", 1e300),
        ("timeout", True),
        ("timeout", timedelta(0)),
        ("timeout", timedelta(seconds=-1)),
        ("stall_warning_seconds", -1),
        ("stall_abort_seconds", "never"),
        ("abort_grace_seconds", float("inf")),
        ("process_group_backend", "mpi"),
        ("process_group_backend", "Gloo"),
        ("process_group_backend", "cpu:gloo,nccl"),
        ("process_group_backend", ""),
        ("process_group_backend", 3),
    ],
)
def test_bad_arguments_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* takes ") as caught:
        resolve(name, value)
    assert OPTIONS[name].accepts in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bucket_cap_mb", "x"),
        ("bucket_cap_mb", "-3"),
        ("timeout", "0:30:00"),
        ("timeout", "1e300"),
        ("timeout", "nan"),
        ("stall_warning_seconds", "inf"),
        ("process_group_backend", "smoke"),
        ("sparse_as_dense", "2"),
    ],
)
def test_bad_variables_are_named(name: str, text: str) -> None:
    variable = f"HVD_{name.upper()}"
    with pytest.raises(ValueError, match=f"{variable}={text!r} is not accepted"):
        resolve(name, environ={variable: text})


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_are_acceptable(name: str) -> None:
    option = OPTIONS[name]
    assert option.from_argument(option.default) == option.default
    assert option.env == f"HVD_{name.upper()}"
    assert option.help.endswith(".")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("True", True), ("on", True), ("0", False), (" no ", False)]
)
def test_truth_in_the_environment(text: str, value: bool) -> None:
    assert resolve("sparse_as_dense", environ={"HVD_SPARSE_AS_DENSE": text}) is value
    assert resolve("sparse_as_dense", not value, {"HVD_SPARSE_AS_DENSE": text}) is not value


@pytest.mark.parametrize("value", [1, "True", 0.0])
def test_truth_is_said_by_true_or_false(value: object) -> None:
    with pytest.raises(ValueError, match=r"sparse_as_dense=.* takes True or False"):
        resolve("sparse_as_dense", value)


def test_zero_means_never() -> None:
    for name in ("stall_warning_seconds", "stall_abort_seconds", "abort_grace_seconds"):
        assert resolve(name, 0) == 0.0


def test_open_session_takes_options_of_the_table() -> None:
    from hvd_strategy.session import open_session

    parameters = inspect.signature(open_session).parameters
    assert set(parameters) - {"world", "address"} <= set(OPTIONS)
