"""The ledger of a worker's transfer jobs: each is accepted once and reported once, whatever becomes of it.

    accepted --(sources copied, or the store given up)--> settled --(result known)--> done --(reported)-->
    gone

A job is settled when the engine's pages are no longer touched for it: the pages of a store may then be reused
while its bytes are still on their way, and that is all that `wait_settled` waits for, never for the network.
"""

import threading
from collections.abc import Callable, Iterable

import attrs


@attrs.frozen(kw_only=True)
class Done:
    """A finished job as the engine will hear of it. `is_failed` only ever means a load."""

    job_id: int
    moved_bytes: int
    seconds: float
    is_load: bool
    is_failed: bool = False


@attrs.define
class _Job:
    is_load: bool
    started: float
    is_settled: bool = False
    is_urgent: bool = False
    is_revoked: bool = False


class JobLedger:
    """Thread safe. `clock` returns seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._done: list[Done] = []
        self.changed = threading.Condition()

    def accept(self, job_id: int, *, is_load: bool) -> None:
        """Open a job. Raises ValueError if its id is already open."""
        with self.changed:
            if job_id in self._jobs:
                raise ValueError(f"job {job_id} was accepted before")
            self._jobs[job_id] = _Job(is_load=is_load, started=self._clock())

    def settle(self, job_id: int) -> None:
        """The engine's pages are not touched for this job any more. Idempotent."""
        with self.changed:
            job = self._jobs.get(job_id)
            if job is not None:
                job.is_settled = True
                self.changed.notify_all()

    def finish(self, job_id: int, *, moved_bytes: int, is_failed: bool = False) -> None:
        """The job's result is known. A second result for the same job is ignored."""
        with self.changed:
            job = self._jobs.pop(job_id, None)
            if job is not None:
                seconds = self._clock() - job.started
                self._done.append(
                    Done(
                        job_id=job_id,
                        moved_bytes=moved_bytes,
                        seconds=seconds,
                        is_load=job.is_load,
                        is_failed=is_failed,
                    )
                )
                self.changed.notify_all()

    def take_done(self) -> list[Done]:
        """Results since the last call, each exactly once."""
        with self.changed:
            done, self._done = self._done, []
        return done

    def is_urgent(self, job_id: int) -> bool:
        """Whether somebody waits for this job to settle: then it must not wait for anything itself."""
        job = self._jobs.get(job_id)
        return job is not None and job.is_urgent

    def is_revoked(self, job_id: int) -> bool:
        """Whether the engine stopped waiting for this job to settle."""
        job = self._jobs.get(job_id)
        return job is not None and job.is_revoked

    def wait_settled(self, job_ids: Iterable[int], timeout_seconds: float) -> tuple[int, ...]:
        """Wait until none of `job_ids` touches the engine's pages; unknown ids count as settled.

        Returns the ids that still do after `timeout_seconds`. They are revoked: from now on the engine may
        change those pages, so what is copied out of them must not be stored.
        """
        ids = tuple(job_ids)
        with self.changed:
            for job_id in ids:
                if job_id in self._jobs:
                    self._jobs[job_id].is_urgent = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._unsettled(ids), timeout_seconds)
            late = self._unsettled(ids)
            for job_id in late:
                self._jobs[job_id].is_revoked = True
            return late

    def _unsettled(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for i in ids if i in self._jobs and not self._jobs[i].is_settled)
