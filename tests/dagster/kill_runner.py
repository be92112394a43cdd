"""Runs the asset's job in a process group of its own, again and again, to be killed by a test.

Reads partition keys from standard input; for each it forks a child that runs the real job with the
instance in `DAGSTER_HOME`, and prints the child's process id. Forking saves the imports' seconds.
"""

import os
import sys
import traceback

import dagster as dg

from tests.dagster import deployment


def run(day: str) -> None:
    with dg.DagsterInstance.get() as instance:
        job = deployment.defs.resolve_job_def("scores_in_process")
        job.execute_in_process(partition_key=day, instance=instance)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setsid()
            code = 1
            try:
                run(line.strip())
                code = 0
            except BaseException:  # noqa: BLE001 - the exit code is the answer
                traceback.print_exc()
            os._exit(code)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
