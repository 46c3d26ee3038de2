"""A/B tests of drafting strategies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Unpack

from google.protobuf.field_mask_pb2 import FieldMask

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood.admin.v1.experiments_pb2_grpc import ExperimentServiceStub
from draftwood_client.admin.calls import AsyncCalls, Calls
from draftwood_client.admin.reports import ExperimentReport
from draftwood_client.admin.resources import Experiment
from draftwood_client.options import CallOptions
from draftwood_client.protocol.convert import from_message, to_message

if TYPE_CHECKING:
    from draftwood.admin.v1.experiments_pb2_grpc import ExperimentServiceAsyncStub

PREFIX = "experiments/"
"""Of resource names; the methods take what comes after it."""


class Experiments:
    """`AdminClient.experiments`. Every method raises `StatusError`; with `validate_only` nothing is changed."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def get(self, experiment: str, **call: Unpack[CallOptions]) -> Experiment:
        """Raises `NotFoundError`."""
        return _experiment(
            self._calls.ask(self._stub.GetExperiment, pb.GetExperimentRequest(name=PREFIX + experiment), call)
        )

    def list(self, *, page_size: int = 0, **call: Unpack[CallOptions]) -> Iterator[Experiment]:
        """All experiments by name; pages are read during iteration."""
        request = pb.ListExperimentsRequest(page_size=page_size)
        for page in self._calls.pages(self._stub.ListExperiments, request, call):
            yield from map(_experiment, page.experiments)

    def create(
        self, experiment: str, config: Experiment, *, validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Experiment:
        """Makes a draft. Raises `AlreadyExistsError`."""
        return _experiment(
            self._calls.ask(self._stub.CreateExperiment, _create(experiment, config, validate_only), call)
        )

    def update(
        self, config: Experiment, mask: Iterable[str] = (), *, validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Experiment:
        """Changes the experiment that `config.name` names.

        Args:
            mask: fields to change, such as "coverage"; none for those that `config` sets, "*" for all.

        Raises:
            AbortedError: `config.etag` is set, and not the current one.
            FailedPreconditionError: its state does not allow the change, or it is in the servers' file.
        """
        return _experiment(self._calls.ask(self._stub.UpdateExperiment, _update(config, mask, validate_only), call))

    def delete(
        self,
        experiment: str,
        *,
        etag: str = "",
        allow_missing: bool = False,
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> None:
        """Also deletes its counts and the memories of its arms. Raises as `update`."""
        self._calls.ask(self._stub.DeleteExperiment, _delete(experiment, etag, allow_missing, validate_only), call)

    def start(
        self, experiment: str, *, etag: str = "", validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Experiment:
        """Begins to assign requests. Raises as `update`."""
        request = pb.StartExperimentRequest(name=PREFIX + experiment, etag=etag, validate_only=validate_only)
        return _experiment(self._calls.ask(self._stub.StartExperiment, request, call))

    def stop(
        self, experiment: str, *, etag: str = "", validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Experiment:
        """Ends the assignment for good. Raises as `update`."""
        request = pb.StopExperimentRequest(name=PREFIX + experiment, etag=etag, validate_only=validate_only)
        return _experiment(self._calls.ask(self._stub.StopExperiment, request, call))

    def conclude(
        self,
        experiment: str,
        winner: str = "",
        *,
        keep_tenants: bool = False,
        etag: str = "",
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> Experiment:
        """Stops it if it runs, and makes an arm's drafting that of the tenants in scope. Raises as `update`.

        Args:
            winner: the arm; "" for the one that the report says is better.
            keep_tenants: leave the tenants' configuration as it is.
        """
        request = _conclude(experiment, winner, keep_tenants, etag, validate_only)
        return _experiment(self._calls.ask(self._stub.ConcludeExperiment, request, call))

    def report(self, experiment: str, **call: Unpack[CallOptions]) -> ExperimentReport:
        """What was counted so far, and what may be concluded from it."""
        request = pb.GetExperimentReportRequest(name=PREFIX + experiment)
        return _report(self._calls.ask(self._stub.GetExperimentReport, request, call))

    @property
    def _stub(self) -> ExperimentServiceStub:
        return ExperimentServiceStub(self._calls.channel)


class AsyncExperiments:
    """`AsyncAdminClient.experiments`. See `Experiments`."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls

    async def get(self, experiment: str, **call: Unpack[CallOptions]) -> Experiment:
        request = pb.GetExperimentRequest(name=PREFIX + experiment)
        return _experiment(await self._calls.ask(self._stub.GetExperiment, request, call))

    async def list(self, *, page_size: int = 0, **call: Unpack[CallOptions]) -> AsyncIterator[Experiment]:
        request = pb.ListExperimentsRequest(page_size=page_size)
        async for page in self._calls.pages(self._stub.ListExperiments, request, call):
            for one in page.experiments:
                yield _experiment(one)

    async def create(
        self, experiment: str, config: Experiment, *, validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Experiment:
        request = _create(experiment, config, validate_only)
        return _experiment(await self._calls.ask(self._stub.CreateExperiment, request, call))

    async def update(
        self, config: Experiment, mask: Iterable[str] = (), *, validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Experiment:
        request = _update(config, mask, validate_only)
        return _experiment(await self._calls.ask(self._stub.UpdateExperiment, request, call))

    async def delete(
        self,
        experiment: str,
        *,
        etag: str = "",
        allow_missing: bool = False,
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> None:
        request = _delete(experiment, etag, allow_missing, validate_only)
        await self._calls.ask(self._stub.DeleteExperiment, request, call)

    async def start(
        self, experiment: str, *, etag: str = "", validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Experiment:
        request = pb.StartExperimentRequest(name=PREFIX + experiment, etag=etag, validate_only=validate_only)
        return _experiment(await self._calls.ask(self._stub.StartExperiment, request, call))

    async def stop(
        self, experiment: str, *, etag: str = "", validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Experiment:
        request = pb.StopExperimentRequest(name=PREFIX + experiment, etag=etag, validate_only=validate_only)
        return _experiment(await self._calls.ask(self._stub.StopExperiment, request, call))

    async def conclude(
        self,
        experiment: str,
        winner: str = "",
        *,
        keep_tenants: bool = False,
        etag: str = "",
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> Experiment:
        request = _conclude(experiment, winner, keep_tenants, etag, validate_only)
        return _experiment(await self._calls.ask(self._stub.ConcludeExperiment, request, call))

    async def report(self, experiment: str, **call: Unpack[CallOptions]) -> ExperimentReport:
        request = pb.GetExperimentReportRequest(name=PREFIX + experiment)
        return _report(await self._calls.ask(self._stub.GetExperimentReport, request, call))

    @property
    def _stub(self) -> ExperimentServiceAsyncStub:
        return ExperimentServiceStub(self._calls.channel)


def _experiment(message: pb.Experiment) -> Experiment:
    return from_message(Experiment, message)


def _report(message: pb.ExperimentReport) -> ExperimentReport:
    return from_message(ExperimentReport, message)


def _create(experiment: str, config: Experiment, validate_only: bool) -> pb.CreateExperimentRequest:
    message = to_message(config, pb.Experiment)
    return pb.CreateExperimentRequest(experiment_id=experiment, experiment=message, validate_only=validate_only)


def _update(config: Experiment, mask: Iterable[str], validate_only: bool) -> pb.UpdateExperimentRequest:
    message, paths = to_message(config, pb.Experiment), FieldMask(paths=mask)
    return pb.UpdateExperimentRequest(experiment=message, update_mask=paths, validate_only=validate_only)


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
