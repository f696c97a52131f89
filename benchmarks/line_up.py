"""The table of all systems, with the names that the report displays."""

from __future__ import annotations

from functools import partial

from benchmarks import peers
from benchmarks.systems import System, bare_loops, jaxvec_host, jaxvec_scan, jaxvec_sync


def systems(pufferlib_python: str | None) -> dict[str, System]:
    """Returns all systems by name. The first system is the reference of the ratios.

    Args:
        pufferlib_python: Path of an interpreter with PufferLib, or None to exclude PufferLib.
    """
    scans = {
        f"jaxvec in scan: {transport}, {dispatch}": partial(
            jaxvec_scan, transport=transport, dispatch=dispatch
        )
        for transport in ("ffi", "io_callback")
        for dispatch in ("native", "portable")
    }
    sb3 = {"module": "stable_baselines3.common.vec_env"}
    compat = {"module": "jaxvec.compat.stable_baselines3"}
    return {
        "bare env.step loops, one per core": bare_loops,
        "bare loops that meet after each step": partial(bare_loops, meet=True),
        "bare loops over env.unwrapped": partial(bare_loops, unwrapped=True),
        **scans,
        "jaxvec in scan: ffi, serial backend": partial(
            jaxvec_scan, transport="ffi", dispatch="native", backend="serial"
        ),
        "jaxvec, Python loop": jaxvec_host,
        "jaxvec, Python loop: serial backend": partial(jaxvec_host, backend="serial"),
        "jaxvec's SyncVectorEnv for Gymnasium": jaxvec_sync,
        "Gymnasium SyncVectorEnv": peers.gymnasium_sync,
        "Gymnasium AsyncVectorEnv (spawn)": peers.gymnasium_async,
        "AsyncVectorEnv by io_callback in scan": peers.gymnasium_async_in_jit,
        "Stable-Baselines3 SubprocVecEnv (spawn)": partial(
            peers.stable_baselines3, **sb3, name="SubprocVecEnv"
        ),
        "jaxvec's SubprocVecEnv for Stable-Baselines3": partial(
            peers.stable_baselines3, **compat, name="SubprocVecEnv"
        ),
        "Stable-Baselines3 DummyVecEnv": partial(peers.stable_baselines3, **sb3, name="DummyVecEnv"),
        "jaxvec's DummyVecEnv for Stable-Baselines3": partial(
            peers.stable_baselines3, **compat, name="DummyVecEnv"
        ),
        "gxm in scan (pure_callback)": peers.gxm,
        "PufferLib 1.0.1 Multiprocessing": partial(peers.pufferlib, python=pufferlib_python),
        "EnvPool xla(), its C++ CartPole": peers.envpool_xla,
    }
