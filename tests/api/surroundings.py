"""What surrounds a run: all that a program may rely on to be afterwards as it was before."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import locale
import logging
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

#: Threads that a framework, or a pool of processes, starts once and keeps: by how they are named.
KEPT_THREADS = ("tqdm_monitor", "QueueFeederThread", "IPythonHistorySavingThread")
#: Processes of loky and of Python that look after semaphores; they end with the program.
KEPT_PROCESSES = ("resource_tracker", "forkserver")
#: Where files are that a library opens once and keeps: devices, and what it is made of.
KEPT_FILES = ("/dev/", "/proc/", "/sys/", sys.prefix, sys.base_prefix, "anon_inode:", "/usr/")


def snapshot(**models: Any) -> dict[str, Any]:
    """Name → value, of all that is to stay as it is.

    Args:
        models: the user's models, by what they are called in the names.
    """
    state: dict[str, Any] = {}
    for part in (_interpreter, _process, _numbers, _logging):
        state |= part()
    for module, part in _FRAMEWORKS.items():
        if module in sys.modules:
            state |= {f"{module}: {name}": value for name, value in part().items()}
    for name, model in models.items():
        state |= {f"{name}: {key}": value for key, value in _model(model).items()}
    return state


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Name → what it was and what it is, of what was there before and is another thing now.

    What was not there before belongs to modules that were imported meanwhile; modules that are
    imported once stay.
    """
    return {
        name: _change(value, after.get(name))
        for name, value in before.items()
        if after.get(name) != value
    }


def _change(previous: Any, current: Any) -> str:
    """What is new and what is gone of a list; else both values."""
    if not isinstance(previous, list) or not isinstance(current, list):
        return f"{previous!r} became {current!r}"
    old, new = Counter(previous), Counter(current)
    return f"new: {sorted((new - old).elements())}, gone: {sorted((old - new).elements())}"


def _interpreter() -> dict[str, Any]:
    return {
        "sys.path": list(sys.path),
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": threading.excepthook,
        "sys.displayhook": sys.displayhook,
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "sys.argv": list(sys.argv),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "sys.trace": (sys.gettrace(), sys.getprofile()),
        "the main module": sys.modules["__main__"],
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count()),
        "faulthandler": faulthandler.is_enabled(),
        "showwarning": (warnings.showwarning, warnings.formatwarning),
        "warning filters": [str(entry) for entry in warnings.filters],
        "int digits": sys.get_int_max_str_digits(),
        "pickle": (pickle.Pickler, pickle.dumps, pickle.loads),
    }


def _process() -> dict[str, Any]:
    process = psutil.Process()
    mask = os.umask(0)
    os.umask(mask)
    return {
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "locale": locale.setlocale(locale.LC_ALL),
        "umask": mask,
        "signals": {
            number: signal.getsignal(number) for number in signal.valid_signals() if number < 32
        },
        "timers": signal.getitimer(signal.ITIMER_REAL),
        "niceness": process.nice(),
        "cores": process.cpu_affinity(),
        "threads of Python": sorted(
            thread.name
            for thread in threading.enumerate()
            if not thread.name.startswith(KEPT_THREADS)
        ),
        "child processes": sorted(
            command
            for child in process.children(recursive=True)
            if not any(pattern in (command := _words(child)) for pattern in KEPT_PROCESSES)
        ),
        "temporary files": sorted(p.name for p in Path(tempfile.gettempdir()).iterdir()),
        "temporary folder": tempfile.tempdir,
        "shared memory": _shared_memory(),
        "open files": _open_files(),
    }


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "gone"


def _shared_memory() -> list[str]:
    folder = Path("/dev/shm")
    ours = f"{os.getpid()}"  # what is made for workers is named after the process that made it
    return sorted(p.name for p in folder.glob(f"*{ours}*")) if folder.is_dir() else []


def _open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    targets = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        try:
            target = str(entry.readlink())
        except OSError:  # the folder itself, which was open while it was read
            continue
        if not target.startswith(KEPT_FILES) and "memfd" not in target:
            targets.append(target.split(":[")[0])
    return sorted(targets)


def _numbers() -> dict[str, Any]:
    state = np.random.get_state()
    return {
        "random": _digest(repr(random.getstate()).encode()),
        "numpy.random": _digest(repr((state[0], state[1].tobytes(), *state[2:])).encode()),
        "numpy errors": np.geterr(),
        "numpy error call": np.geterrcall(),
        "numpy printing": np.get_printoptions(),
    }


def _logging() -> dict[str, Any]:
    """The loggers that were set to something; a new one without settings counts for none."""
    state: dict[str, Any] = {
        "logging disabled": logging.root.manager.disable,
        "logging raises": logging.raiseExceptions,
        "logger root": _logger(logging.root),
        "last resort": logging.lastResort,
        "logger class": logging.getLoggerClass(),
    }
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger):
            state[f"logger {name}"] = _logger(logger)
    return state


def _logger(logger: logging.Logger) -> Any:
    return (
        logger.level,
        logger.propagate,
        logger.disabled,
        tuple((type(h).__name__, h.level, len(h.filters)) for h in logger.handlers),
        tuple(map(repr, logger.filters)),
    )


def _torch() -> dict[str, Any]:
    import torch

    return {
        "threads": torch.get_num_threads(),
        "threads between ops": torch.get_num_interop_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "random": _digest(torch.random.get_rng_state().numpy().tobytes()),
        "seed": torch.initial_seed(),
        "matmul": torch.get_float32_matmul_precision(),
        "oneDNN": (
            torch.backends.mkldnn.enabled,
            torch.backends.mkldnn.deterministic,
            torch.backends.mkldnn.allow_tf32,
            torch.backends.mkldnn.matmul.fp32_precision,
            torch.backends.mkldnn.conv.fp32_precision,
        ),
        "quantized engine": torch.backends.quantized.engine,
        "denormals": float(torch.tensor(1e-310, dtype=torch.float64)) == 0,
        "nnpack": torch._C._get_nnpack_enabled(),
        "printing": str(torch._tensor_str.PRINT_OPTS),
        "hooks of all modules": tuple(
            len(getattr(torch.nn.modules.module, name))
            for name in (
                "_global_forward_hooks",
                "_global_forward_pre_hooks",
                "_global_backward_hooks",
                "_global_buffer_registration_hooks",
                "_global_module_registration_hooks",
                "_global_parameter_registration_hooks",
            )
        ),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "functions of modules": (torch.nn.Module.__call__, torch.nn.Module.__setattr__),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
    }


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf
    from tensorflow.python.eager import context as eager
    from tensorflow.python.framework import config

    context = eager.context()
    drawn = getattr(context, "_rng", None)  # which TensorFlow makes when it first runs
    return {
        "threads": (
            tf.config.threading.get_intra_op_parallelism_threads(),
            tf.config.threading.get_inter_op_parallelism_threads(),
        ),
        "eager": tf.executing_eagerly(),
        "functions eagerly": tf.config.functions_run_eagerly(),
        "jit": tf.config.optimizer.get_jit(),
        "optimizer": tf.config.optimizer.get_experimental_options(),
        "soft placement": tf.config.get_soft_device_placement(),
        "deterministic": config.is_op_determinism_enabled(),
        "TF32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "seed": context._seed,
        "seeds of ops": _digest(repr(drawn and drawn.getstate()).encode()),
        "generator": _digest(tf.random.get_global_generator().state.numpy().tobytes()),
        "logging": tf.get_logger().level,
        "devices": tf.config.list_logical_devices(),
    }


def _keras() -> dict[str, Any]:
    import keras

    return {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image format": keras.config.image_data_format(),
        "policy": keras.config.dtype_policy().name,
        "traceback filtering": keras.config.is_traceback_filtering_enabled(),
        "logging": keras.config.is_interactive_logging_enabled(),
        "unsafe": keras.src.saving.serialization_lib.in_safe_mode(),
        "seed": keras.src.backend.common.global_state.get_global_attribute("global_seed_generator"),
        "learning": keras.src.backend.common.global_state.get_global_attribute("training"),
        "names": dict(
            keras.src.backend.common.global_state.get_global_attribute("object_name_uids") or {}
        ),
        "custom objects": sorted(keras.saving.get_custom_objects()),
    }


def _onnxruntime() -> dict[str, Any]:
    import onnxruntime

    return {
        "providers": tuple(onnxruntime.get_available_providers()),
        "device": onnxruntime.get_device(),
    }


def _optuna() -> dict[str, Any]:
    import optuna

    return {
        "verbosity": optuna.logging.get_verbosity(),
        "propagates": optuna.logging._get_library_root_logger().propagate,
    }


def _matplotlib() -> dict[str, Any]:
    import matplotlib

    return {"backend": matplotlib.get_backend(), "settings": dict(matplotlib.rcParams)}


def _absl() -> dict[str, Any]:
    from absl import logging as absl_logging

    return {"verbosity": absl_logging.get_verbosity()}


_FRAMEWORKS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "keras": _keras,
    "onnxruntime": _onnxruntime,
    "optuna": _optuna,
    "matplotlib": _matplotlib,
    "absl.logging": _absl,
}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _model(model: Any) -> dict[str, Any]:
    """All of a model that a run could touch."""
    if isinstance(model, str | Path):
        folder = Path(model).parent
        files = {p.name: (_digest(p.read_bytes()), p.stat().st_mtime_ns) for p in folder.iterdir()}
        return {"files": files}
    if callable(getattr(model, "SerializeToString", None)):
        return {"bytes": _digest(model.SerializeToString(deterministic=True))}
    if callable(getattr(model, "get_config", None)):
        return _keras_model(model)
    return _torch_model(model)


def _torch_model(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        grad = None if value.grad is None else _digest(value.grad.numpy().tobytes())
        data = _digest(value.detach().numpy().tobytes())
        storage = (id(value), value.data_ptr(), value._version, tuple(value.stride()))
        hooks = len(value._backward_hooks or ())
        state[name] = (data, storage, value.requires_grad, grad, value.is_leaf, hooks)
    for name, module in model.named_modules():
        parts = {key: id(value) for key, value in vars(module).items() if key[:1] != "_"}
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("hooks")}
        state[f"module {name}"] = (module.training, parts, hooks, type(module), module.forward)
    return state


def _keras_model(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = {
        "weights": [_digest(np.asarray(value).tobytes()) for value in model.get_weights()],
        "config": repr(model.get_config()),
        "compiled": (model.compiled, getattr(model, "optimizer", None)),
        "functions": (model.train_function, model.predict_function, model.test_function),
        "names": [layer.name for layer in model.layers],
    }
    for layer in model.layers:
        nodes = (len(layer._inbound_nodes), len(layer._outbound_nodes))
        policy = layer.dtype_policy.name
        state[f"layer {layer.name}"] = (layer.trainable, nodes, policy, layer.built, layer.call)
    return state
