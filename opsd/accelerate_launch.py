"""`accelerate launch` that keeps the exit code of the training process and hands signals on to it. Exec'd by `train_capped.sh`.

accelerate turns every failure into a traceback of its own and exit code 1. Here a worker's code comes through: 2 for bad input, whose one
line the worker has already printed, and whatever a scheduler waits for otherwise. SIGTERM and SIGUSR1 reach the worker, so that it can
save a checkpoint first.
"""

import signal
import subprocess
import sys

BAD_INPUT = 2  # the worker has printed its one line


def _forward(number: int, _frame) -> None:
    import psutil

    for child in psutil.Process().children():
        child.send_signal(number)


def main() -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_command_parser().parse_args()
    signal.signal(
        signal.SIGTERM, _forward
    )  # torchrun installs its own handler over this one when it starts several workers
    signal.signal(signal.SIGUSR1, _forward)
    try:
        launch_command(arguments)
    except subprocess.CalledProcessError as error:
        return _exit_code(error.returncode)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != BAD_INPUT:
            sys.stderr.write(
                f"error: process {rank} ended with code {failure.exitcode}, and with it this host's part of the run. Its own "
                "message is above; a closed connection means that another process or host was lost first. To go on, give every host the "
                "same command with --resume_from_checkpoint latest\n"
            )
        return _exit_code(failure.exitcode)
    except SignalException as error:  # torchrun has passed the signal on and waited for the workers
        return _exit_code(-error.sigval)
    return 0


def _exit_code(code: int) -> int:
    """A shell's convention: 128 + the signal for a process that a signal ended."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
