"""The GPUs of each worker of pytest-xdist."""

from collections.abc import MutableMapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def share_out_gpus(environment: MutableMapping[str, str]) -> None:
    """Sets CUDA_VISIBLE_DEVICES, where it is set already, to what this worker is to see of it.

    With GPUS_ALONE=n in the environment that is n GPUs which no other worker sees. Without, it is all of them, but each
    worker begins with another one, so that tests that need one GPU spread over all.
    """
    if not (worker := environment.get("PYTEST_XDIST_WORKER")) or not (all_gpus := environment.get(VISIBLE)):
        return
    gpus, alone = all_gpus.split(","), int(environment.get("GPUS_ALONE", "0"))
    first = int(worker.removeprefix("gw")) * (alone or 1) % len(gpus)
    environment[VISIBLE] = ",".join((gpus[first:] + gpus[:first])[: alone or len(gpus)])
