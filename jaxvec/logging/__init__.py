"""Episode statistics, run folders and the command line of training programs.

    TimeStep --Episodes.add--> means of the latest episodes --Run.log--> metrics.csv, other loggers

`Episodes` is a pytree that a compiled loop carries. `Run` writes files on the host: a compiled program calls
it through `jax.debug.callback`. `training` reads the `Options` of a program, and opens its `TrainingRun`: the
loop of updates, saves, evaluations and signals.
"""

from jaxvec.logging._episodes import Episodes, play_episodes
from jaxvec.logging._run import Run
from jaxvec.logging._training import Options, Policy, TrainingRun, training

__all__ = ["Episodes", "Options", "Policy", "Run", "TrainingRun", "play_episodes", "training"]
