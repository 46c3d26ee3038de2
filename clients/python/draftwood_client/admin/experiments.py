"""A/B tests of drafting strategies. Requests and answers are the messages of the protocol, which have types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

from google.protobuf.field_mask_pb2 import FieldMask

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood.admin.v1.experiments_pb2_grpc import ExperimentServiceStub
from draftwood_client.admin.calls import AsyncCalls, Calls

PREFIX = "experiments/"
"""Of resource names; the methods take what comes after it."""


class Experiments:
    """`AdminClient.experiments`. Every method raises `StatusError`; with `validate_only` nothing is changed."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def get(self, experiment: str) -> pb.Experiment:
        """Raises `NotFoundError`."""
        return self._calls.ask(self._stub.GetExperiment, pb.GetExperimentRequest(name=PREFIX + experiment))

    def list(self, *, page_size: int = 0) -> Iterator[pb.Experiment]:
        """All experiments by name; pages are read during iteration."""
        request = pb.ListExperimentsRequest(page_size=page_size)
        while True:
            page = self._calls.ask(self._stub.ListExperiments, request)
            yield from page.experiments
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    def create(self, experiment: str, config: pb.Experiment, *, validate_only: bool = False) -> pb.Experiment:
        """Makes a draft. Raises `AlreadyExistsError`."""
        return self._calls.ask(self._stub.CreateExperiment, _create(experiment, config, validate_only))

    def update(self, config: pb.Experiment, mask: Iterable[str] = (), *, validate_only: bool = False) -> pb.Experiment:
        """Changes the experiment that `config.name` names.

        Args:
            mask: fields to change, such as "coverage"; none for those that `config` sets, "*" for all.

        Raises:
            AbortedError: `config.etag` is set, and not the current one.
            FailedPreconditionError: its state does not allow the change, or it is in the servers' file.
        """
        return self._calls.ask(self._stub.UpdateExperiment, _update(config, mask, validate_only))

    def delete(
        self, experiment: str, *, etag: str = "", allow_missing: bool = False, validate_only: bool = False
    ) -> None:
        """Also deletes its counts and the memories of its arms. Raises as `update`."""
        self._calls.ask(self._stub.DeleteExperiment, _delete(experiment, etag, allow_missing, validate_only))

    def start(self, experiment: str, *, etag: str = "", validate_only: bool = False) -> pb.Experiment:
        """Begins to assign requests. Raises as `update`."""
        request = pb.StartExperimentRequest(name=PREFIX + experiment, etag=etag, validate_only=validate_only)
        return self._calls.ask(self._stub.StartExperiment, request)

    def stop(self, experiment: str, *, etag: str = "", validate_only: bool = False) -> pb.Experiment:
        """Ends the assignment for good. Raises as `update`."""
        request = pb.StopExperimentRequest(name=PREFIX + experiment, etag=etag, validate_only=validate_only)
        return self._calls.ask(self._stub.StopExperiment, request)

    def conclude(
        self,
        experiment: str,
        winner: str = "",
        *,
        keep_tenants: bool = False,
        etag: str = "",
        validate_only: bool = False,
    ) -> pb.Experiment:
        """Stops it if it runs, and makes an arm's drafting that of the tenants in scope. Raises as `update`.

        Args:
            winner: the arm; "" for the one that the report says is better.
            keep_tenants: leave the tenants' configuration as it is.
        """
        request = _conclude(experiment, winner, keep_tenants, etag, validate_only)
        return self._calls.ask(self._stub.ConcludeExperiment, request)

    def report(self, experiment: str) -> pb.ExperimentReport:
        """What was counted so far, and what may be concluded from it."""
        request = pb.GetExperimentReportRequest(name=PREFIX + experiment)
        return self._calls.ask(self._stub.GetExperimentReport, request)

    @property
    def _stub(self) -> ExperimentServiceStub:
        return ExperimentServiceStub(self._calls.channel)


class AsyncExperiments:
    """`AsyncAdminClient.experiments`. See `Experiments`."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls

    async def get(self, experiment: str) -> pb.Experiment:
        request = pb.GetExperimentRequest(name=PREFIX + experiment)
        return await self._calls.ask(ExperimentServiceStub(self._calls.channel).GetExperiment, request)

    async def list(self, *, page_size: int = 0) -> AsyncIterator[pb.Experiment]:
        request = pb.ListExperimentsRequest(page_size=page_size)
        while True:
            page = await self._calls.ask(ExperimentServiceStub(self._calls.channel).ListExperiments, request)
            for one in page.experiments:
                yield one
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    async def create(self, experiment: str, config: pb.Experiment, *, validate_only: bool = False) -> pb.Experiment:
        request = _create(experiment, config, validate_only)
        return await self._calls.ask(ExperimentServiceStub(self._calls.channel).CreateExperiment, request)

    async def update(
        self, config: pb.Experiment, mask: Iterable[str] = (), *, validate_only: bool = False
    ) -> pb.Experiment:
        request = _update(config, mask, validate_only)
        return await self._calls.ask(ExperimentServiceStub(self._calls.channel).UpdateExperiment, request)

    async def delete(
        self, experiment: str, *, etag: str = "", allow_missing: bool = False, validate_only: bool = False
    ) -> None:
        request = _delete(experiment, etag, allow_missing, validate_only)
        await self._calls.ask(ExperimentServiceStub(self._calls.channel).DeleteExperiment, request)

    async def start(self, experiment: str, *, etag: str = "", validate_only: bool = False) -> pb.Experiment:
        request = pb.StartExperimentRequest(name=PREFIX + experiment, etag=etag, validate_only=validate_only)
        return await self._calls.ask(ExperimentServiceStub(self._calls.channel).StartExperiment, request)

    async def stop(self, experiment: str, *, etag: str = "", validate_only: bool = False) -> pb.Experiment:
        request = pb.StopExperimentRequest(name=PREFIX + experiment, etag=etag, validate_only=validate_only)
        return await self._calls.ask(ExperimentServiceStub(self._calls.channel).StopExperiment, request)

    async def conclude(
        self,
        experiment: str,
        winner: str = "",
        *,
        keep_tenants: bool = False,
        etag: str = "",
        validate_only: bool = False,
    ) -> pb.Experiment:
        request = _conclude(experiment, winner, keep_tenants, etag, validate_only)
        return await self._calls.ask(ExperimentServiceStub(self._calls.channel).ConcludeExperiment, request)

    async def report(self, experiment: str) -> pb.ExperimentReport:
        request = pb.GetExperimentReportRequest(name=PREFIX + experiment)
        return await self._calls.ask(ExperimentServiceStub(self._calls.channel).GetExperimentReport, request)


def _create(experiment: str, config: pb.Experiment, validate_only: bool) -> pb.CreateExperimentRequest:
    return pb.CreateExperimentRequest(experiment_id=experiment, experiment=config, validate_only=validate_only)


def _update(config: pb.Experiment, mask: Iterable[str], validate_only: bool) -> pb.UpdateExperimentRequest:
    paths = FieldMask(paths=mask)
    return pb.UpdateExperimentRequest(experiment=config, update_mask=paths, validate_only=validate_only)


def _delete(experiment: str, etag: str, allow_missing: bool, validate_only: bool) -> pb.DeleteExperimentRequest:
    return pb.DeleteExperimentRequest(
        name=PREFIX + experiment, etag=etag, allow_missing=allow_missing, validate_only=validate_only
    )


def _conclude(
    experiment: str, winner: str, keep_tenants: bool, etag: str, validate_only: bool
) -> pb.ConcludeExperimentRequest:
    return pb.ConcludeExperimentRequest(
        name=PREFIX + experiment,
        etag=etag,
        winner=winner,
        keep_tenants=keep_tenants,
        validate_only=validate_only,
    )
