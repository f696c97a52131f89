"""Types of the native library, see module.cc. Arrays of slots are int64, arrays of generations uint32."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, final

from numpy.typing import NDArray

from jaxvec._memory.segment import Marks

SOURCES: str  # digest of the C++ sources, see CMakeLists.txt

# --- dispatch.h ---

@final
class Parent:
    """The parent's end of the dispatch. Its methods release the GIL."""

    def send(self, verb: int, slots: NDArray[Any], /) -> None: ...
    def notify_worker(self, worker: int, /) -> None: ...
    def wait(self, slots: NDArray[Any], count: int, timeout_ns: int, /) -> bool: ...
    def mark_notices_seen(self) -> None: ...
    def close(self) -> None: ...

@final
class Worker:
    """A worker's end of the dispatch. Its methods release the GIL."""

    def take(self, slots: NDArray[Any], /) -> tuple[int, int]:
        """Waits for work and stores it in `slots`, which has room for all slots of the worker.

        Returns its verb and number of slots, 0 for a message.
        """

    def post(self, slots: NDArray[Any], /) -> None: ...
    def post_some(self, first: int, count: int, /) -> None: ...
    def mark_notice_seen(self) -> None: ...
    def notify_parent(self) -> None: ...

def parent(
    marks: Marks,
    stops: NDArray[Any],
    sockets: NDArray[Any],
    spin_ns: int,
    look_around_ns: int,
    longest_spin_ns: int,
    rings_once: bool,
    /,
) -> Parent:
    """Returns the parent's end. `stops` has the end of each worker's slots."""

def worker(
    marks: Marks, worker: int, slots: NDArray[Any], notices: int, spin_ns: int, keeps_core: bool, /
) -> Worker:
    """Returns the end of a worker, which has neighbouring slots."""

def request_short_slices() -> str | None:
    """Requests short slices for this thread; returns the reason if it keeps the default slices."""

# --- engine.h ---

@final
class Engine:
    """The engine of a pool that compiled programs step without Python. Its methods release the GIL."""

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
        """Returns the `Status`, new arrays with the results, and the ns waited so far.

        Leaves with an index in `unread` get no rows.
        """

    def check_handle(self, slots: NDArray[Any], generation: NDArray[Any] | None, /) -> int: ...
    def check_envs(self, slots: NDArray[Any], stepped: bool, /) -> int: ...
    def wait_for_copies(self) -> None: ...
    def start_trace(self, capacity: int, /) -> None: ...
    def stop_trace(self) -> tuple[bytes, int]:
        """Returns the ring buffer, with the `Span`s of trace.h, and the number of spans that were added."""

    def close(self) -> None: ...

class Plan(TypedDict):
    """The arguments of an engine; `Plan` in engine.h documents them."""

    pool_id: int
    parent: Parent
    fingerprint: int
    batch_size: int
    in_order: bool
    all_at_once: bool
    wait_ns: int
    step_ns: int
    generation: NDArray[Any]
    actions: Sequence[NDArray[Any]]
    num_options: int
    results: Sequence[NDArray[Any]]
    nonzero: Sequence[NDArray[Any] | None]
    in_flight: NDArray[Any]
    sent: NDArray[Any]
    num_sent: NDArray[Any]
    due: NDArray[Any]
    needs_reset: NDArray[Any]
    terminated: NDArray[Any] | None
    truncated: NDArray[Any] | None
    step_here: Callable[[NDArray[Any]], None] | None

def engine(plan: Plan, /) -> tuple[Engine, NDArray[Any]]:
    """Returns an engine, which programs find by its pool's id until it is closed, and its `State`."""

# --- call.h, cuda.h, ffi.cc, interrupts.h ---

FFI_VERSION: int
FFI_CALL: Any  # capsules
FFI_CUDA_CALL: Any

def set_python(serve: Callable[..., None] | None, fail: Callable[..., bytes] | None, /) -> None:
    """Sets the functions that answer calls and that report their errors; `None` at the interpreter's end."""

def call_packed(
    verb: int,
    fresh: bool,
    extra: bytes,
    fingerprint: int,
    operand_layout: NDArray[Any],
    result_layout: NDArray[Any],
    operands: Sequence[NDArray[Any]],
    results: Sequence[NDArray[Any]],
    /,
) -> None:
    """Makes a call of a program, without Python if possible. Raises the exception that ends the call.

    Args:
        verb: `Verb` of the call.
        fresh: True for a reset of the whole pool.
        extra: Further arguments, pickled as for an FFI call.
        fingerprint: Fingerprint of the specification that the program was compiled for.
        operand_layout, result_layout: `Packing.layout` of all operands and of all results.
        operands, results: Transferred arrays. Those of results are written.
    """

def prepare_cuda(calls: int, sizes: NDArray[Any], /) -> None:
    """Page-locks memory for `calls` simultaneous calls, each with arrays of these sizes in bytes."""

def use_cuda(driver: str, /) -> None:
    """Loads a CUDA driver by its file name. For tests."""

def watch_interrupts() -> None: ...
def interrupts() -> int: ...

# --- stepper.cc, states.cc ---

Fields: TypeAlias = tuple[dict[str, Any], dict[str, Any], tuple[str, ...] | None]
Nodes: TypeAlias = tuple[set[type], type, type, type, type, type, type, type]

def leaf_writer(write: Callable[[int, Any], None], rows: NDArray[Any], /) -> Callable[[int, Any], None]:
    """Returns a faster `write(slot, value)`, which calls `write` for unusual values."""

def nested_writer(
    write: Callable[[int, Any], None],
    keys: tuple[Any, ...] | None,
    children: tuple[Callable[[int, Any], None], ...],
    /,
) -> Callable[[int, Any], None]:
    """Returns a faster `write` for a dict with these keys, or for a tuple; see `leaf_writer`."""

def plain_identity(
    container: Any, atoms: set[type], known: int | None, /
) -> Literal[True] | tuple[int, set[int]] | None:
    """Recognises a container that has not changed; see `Plain` in `snapshots/node_types.py`."""

def restore_changes(
    layers: list[Any], classes: tuple[type, ...], fields: list[Fields], nodes: Nodes, /
) -> bool:
    """Restores a snapshot; returns False, with no change, if Python has to. See `StatefulEnv`."""

def save_changes(
    layers: list[Any], classes: tuple[type, ...], before: list[Fields], nodes: Nodes, /
) -> list[Fields] | None:
    """Returns a snapshot that shares unchanged parts with `before`; `None` if Python has to save it."""

class Columns(TypedDict):
    """The arguments of a stepping loop; `Stepper` in stepper.cc documents them.

    Lists and arrays are indexed by env, and the loop changes them. With `marks=None`, Python handles the
    first step after an episode's end.
    """

    states: list[int]
    infos: list[dict[str, Any]]
    marks: tuple[NDArray[Any], ...] | None
    returns: NDArray[Any]
    lengths: NDArray[Any]
    row_reward: NDArray[Any]
    row_return: NDArray[Any]
    row_length: NDArray[Any]
    running: NDArray[Any]
    forked: list[int]
    write_obs: Callable[[int, Any], None]
    write_info: Callable[[int, dict[str, Any]], None]
    first: int
    marked: int

def stepper(columns: Columns, /) -> Stepper:
    """Returns the stepping loop of a slice."""

@final
class Stepper:
    """Steps envs one after the other, while their steps are ordinary."""

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
        """Steps the envs of `indices[place:]` until a step is not ordinary.

        Args:
            place: Position in `indices` of the first env to step.
            envs: The env of each index.
            limits: Attributes of the bypassed `TimeLimit`s of each index, innermost first.
            indices: Indices of the envs to step.
            actions: One action for each of `indices`.
            end_step: Called at an episode's end with index, observation, both flags and info. Returns the
                observation and info of the row.
            after: Called with each index after its step.

        Returns:
            The position where the loop stopped, `len(indices)` if all steps are done; and the unhandled
            result of `step` there, or `None` if that env was not stepped. Its row is not written.
        """
