"""Makes a Python on Linux lack what macOS lacks. Python imports it at its start if it finds it on PYTHONPATH,
so the processes that a command starts lack it too."""

import builtins
import ctypes
import io
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

_MISSING = {
    os: "eventfd eventfd_read eventfd_write sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate"
    " memfd_create pidfd_open pipe2 fdatasync splice copy_file_range setns unshare accept4 O_TMPFILE O_PATH",
    select: "epoll POLLRDHUP EPOLLIN EPOLLOUT EPOLLERR EPOLLHUP EPOLLRDHUP",
    signal: "sigtimedwait sigwaitinfo pidfd_send_signal SIGPWR SIGRTMIN SIGRTMAX",
    socket: "TCP_INFO TCP_USER_TIMEOUT SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK SO_BINDTODEVICE SO_PEERCRED",
    resource: "prlimit",
}


def _without_proc(opens: Callable[..., Any]) -> Callable[..., Any]:
    def opening(file: Any, *details: Any, **more: Any) -> Any:
        name = os.fspath(file) if isinstance(file, str | bytes | os.PathLike) else ""
        if os.fsdecode(name).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", name)
        return opens(file, *details, **more)

    return opening


def _without_prctl(library: ctypes.CDLL, name: str) -> Any:
    if name == "prctl":
        raise AttributeError(name)
    return _symbol(library, name)


for _module, _names in _MISSING.items():
    for _name in _names.split():
        if hasattr(_module, _name):
            delattr(_module, _name)
if hasattr(os, "process_cpu_count"):  # Python 3.13 chose when it started; this is what it has elsewhere
    os.process_cpu_count = os.cpu_count
sys.modules.pop("selectors", None)  # it chooses when it is imported
os.open = _without_proc(os.open)
io.open = builtins.open = _without_proc(io.open)
_symbol = ctypes.CDLL.__getattr__
ctypes.CDLL.__getattr__ = _without_prctl  # type: ignore[method-assign]
