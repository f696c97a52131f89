"""The native library, in C++: see module.cc. Arrays of slots are int64, those of generations uint32."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, final

from numpy.typing import NDArray

from jaxvec._memory.segment import Marks

# --- handoff.h ---

@final
class Parent:
    """The parent's end of the dispatch; its methods let go of the GIL. See `ParentHandoff`."""

    def __new__(cls, *, marks: Marks, sockets: NDArray[Any], spin_ns: int, look_around_ns: int) -> Parent: ...
    def send(self, worker: int, verb: int, slots: NDArray[Any], /) -> None: ...
    def pass_on(self, worker: int, requests: NDArray[Any], slots: NDArray[Any], /) -> None: ...
    def notify_worker(self, worker: int, /) -> None: ...
    def wait(self, slots: NDArray[Any], count: int, timeout_ns: int, /) -> bool: ...
    def mark_notices_seen(self) -> None: ...
    def notify_parent(self) -> None: ...
    def close(self) -> None: ...

@final
class Worker:
    """A worker's end; its methods let go of the GIL. See `WorkerHandoff`."""

    def __new__(
        cls, *, marks: Marks, index: int, first: int, stop: int, notices: int, spin_ns: int
    ) -> Worker: ...
    def take(self, slots: NDArray[Any], /) -> tuple[int, int]:
        """Waits for work, and fills `slots` with it; returns the verb and how many, 0 for a message."""

    def post(self, slots: NDArray[Any], /) -> None: ...
    def post_some(self, first: int, count: int, /) -> None: ...
    def mark_notice_seen(self) -> None: ...
    def notify_worker(self) -> None: ...
    def notify_parent(self) -> None: ...

# --- pool.h ---

@final
class Pool:
    """The engine of a pool that compiled programs step without Python; its methods let go of the GIL.

    See `Engine`, and `Plan` of pool.h for the arguments. Programs find it by its id until it is closed.
    """

    def __new__(
        cls,
        *,
        pool_id: int,
        parent: Parent,
        fingerprint: int,
        batch_size: int,
        in_order: bool,
        together: int,
        wait_ns: int,
        step_ns: int,
        stops: NDArray[Any],
        generation: NDArray[Any],
        actions: Sequence[NDArray[Any]],
        results: Sequence[NDArray[Any]],
        nonzero: Sequence[NDArray[Any] | None],
        in_flight: NDArray[Any],
        sent: NDArray[Any],
        num_sent: NDArray[Any],
        due: NDArray[Any],
        needs_reset: NDArray[Any],
        terminated: NDArray[Any] | None,
        truncated: NDArray[Any] | None,
    ) -> Pool: ...

    last_caller: int
    @property
    def num_served(self) -> int: ...
    def enter(self, slots: NDArray[Any] | None, exclusive: bool, timeout_ns: int, /) -> bool: ...
    def leave(self) -> None: ...
    def hold(self, slots: NDArray[Any], alone: bool, /) -> None: ...
    def holds(self) -> bool: ...
    def release(self) -> None: ...
    def move(
        self,
        verb: int,
        caller_code: int,
        new_generation: bool,
        slots: NDArray[Any] | None,
        generation: NDArray[Any] | None,
        sent: NDArray[Any] | None,
        actions: Sequence[NDArray[Any]],
        unread: Collection[int],
        /,
    ) -> tuple[int, list[NDArray[Any]], int]:
        """Returns the `Status`, new arrays for the rows of a time step, and the ns waited so far.

        The leaves of `unread` get no rows.
        """

    def check_handle(self, slots: NDArray[Any], generation: NDArray[Any] | None, /) -> int: ...
    def check_envs(self, slots: NDArray[Any], stepped: bool, /) -> int: ...
    def wait_for_copies(self) -> None: ...
    def close_fast_path(self) -> None: ...
    def allow_gpu(self) -> None: ...
    def count_success(self) -> None: ...
    def start_trace(self, capacity: int, /) -> None: ...
    def stop_trace(self) -> tuple[list[tuple[int, int, int, int]], int]:
        """Returns the spans (what, began, ended, thread), and how many more there were."""

    def close(self) -> None: ...

# --- call.h, cuda.h, ffi.h, interrupts.h ---

FFI_VERSION: int
FFI_CALL: Any  # capsules
FFI_CUDA_CALL: Any

def set_python(serve: Callable[..., None] | None, fail: Callable[..., bytes] | None, /) -> None:
    """Sets what answers programs' calls, and what ends those that raise; `None` when the interpreter ends."""

def prepare_cuda(calls: int, sizes: NDArray[Any], /) -> None:
    """Page-locks memory for so many calls at once, of arrays of these sizes."""

def use_cuda(driver: str | None, /) -> None:
    """Takes another CUDA driver, `None` for the machine's; for tests."""

def call_cuda(
    *,
    stream: int,
    verb: int,
    fresh: bool,
    extra: bytes,
    fingerprint: int,
    operands: Sequence[NDArray[Any]],
    results: Sequence[NDArray[Any]],
    packed: NDArray[Any],
) -> str:
    """Makes a call as a program on a GPU would, and returns the error's text; for tests."""

def watch_interrupts() -> None:
    """Counts Ctrl-C from now on."""

def interrupts() -> int:
    """Returns how many there were."""

# --- stepper.cc, states.cc ---

Fields: TypeAlias = tuple[dict[str, Any], dict[str, Any], int]
Nodes: TypeAlias = tuple[set[type], type, type, type, type, type]

def leaf_writer(write: Callable[[int, Any], None], rows: NDArray[Any], /) -> Callable[[int, Any], None]:
    """Returns what writes a row as `write` does, and calls it with values that need care."""

def nested_writer(
    write: Callable[[int, Any], None],
    keys: tuple[Any, ...] | None,
    children: tuple[Callable[[int, Any], None], ...],
    /,
) -> Callable[[int, Any], None]:
    """Returns what writes a dict of these keys, or a tuple, as `write` does; see `leaf_writer`."""

def put_again(
    layers: list[Any], told: list[frozenset[str] | None], fields: list[Fields], nodes: Nodes, /
) -> bool:
    """Puts a snapshot back, as `_snapshots/snapshot.py` says."""

def take_again(
    layers: list[Any], told: list[frozenset[str] | None], before: list[Fields], nodes: Nodes, /
) -> list[Fields] | None:
    """Takes a snapshot, as `_snapshots/snapshot.py` says."""

def stepper(
    *,
    states: list[int],
    infos: list[dict[str, Any]],
    marks: tuple[NDArray[Any], ...] | None,
    returns: NDArray[Any],
    lengths: NDArray[Any],
    row_reward: NDArray[Any],
    row_return: NDArray[Any],
    row_length: NDArray[Any],
    running: NDArray[Any],
    forked: list[int],
    write_obs: Callable[[int, Any], None],
    write_info: Callable[[int, dict[str, Any]], None],
    first: int,
    marked: int,
) -> Stepper:
    """Returns the loop of a slice; of its index, what the lists and columns have, which it changes.

    `marks` are the columns that say how the episode before has ended; `None` leaves them to Python.
    """

@final
class Stepper:
    """Steps envs in turn, for as long as their steps are ordinary."""

    def run(
        self,
        place: int,
        envs: list[Any],
        limits: list[tuple[dict[str, Any], ...]],
        indices: list[int],
        actions: list[Any],
        end_step: Callable[[int, Any, bool, bool, dict[str, Any]], tuple[Any, dict[str, Any]]],
        after: Callable[[int], None] | None,
        /,
    ) -> tuple[int, Any]:
        """Steps from `place` in `indices` on; returns where it stopped, and what `step` has returned there.

        Args:
            place: of the first.
            envs: to be called, by index.
            limits: the attributes of the `TimeLimit`s around each that are passed by but count, inmost first.
            indices: of the envs to be stepped.
            actions: of each of these.
            end_step: is called at an episode's end, with index, observation, flags and info; returns the
                row's observation and info.
            after: is told of each that is done.

        Returns:
            `len(indices)` if all is done. Where it stopped before, the row is not written.
        """
