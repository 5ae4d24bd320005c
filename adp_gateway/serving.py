"""From a configuration to a gateway that serves until a signal: the order in which things start and end.

    directory   looked at, and made if absent; nothing is written to one that cannot be a store
    listeners   opened next, so that a port in use costs the directory nothing; clients queue meanwhile
    admin port  answers from here on: "starting"
    store       opened, which takes as long as recovery takes
    serving     `ready` on standard output, READY=1 to the service manager
    drain       at the first signal; a second one cuts

Whatever is opened is closed in the opposite order, however it ends.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Sequence

import anyio
import anyio.abc
import attrs

from adp_client.transport import Endpoint

from .admin import Admin, Pages
from .config import GatewayConfig
from .device.file import FileDevice
from .errors import StorageError
from .health import Condition, Health
from .listeners import Listener, close_all, open_listeners
from .metrics import GatewayCollector, Source, make_registry
from .notify import notify
from .roster import check_workers
from .server import AGENT, Server
from .store.recovery import check_place
from .store.segments import SegmentStore
from .workers import Assignment

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_SIGNAL = 128  # plus the number of the signal


async def serve_until_signal(config: GatewayConfig, assignment: Assignment | None = None) -> int:
    """Serve until SIGTERM or SIGINT has drained it, or a second one has cut it short; the exit status.

    With an `assignment` as one of several workers, of which `config` is the share; until its parent is gone.

    Raises:
        StorageError: the data directory cannot be used.
        OSError: an endpoint cannot be had.
    """
    ending = _Ending()
    source = Source(health=ending.health, version=AGENT.partition("/")[2], durability=config.store.durability)
    collector = GatewayCollector(source)
    if assignment is None:
        check_workers(config.store.directory, 1)
    is_new = _look_at_directory(config)
    listeners: list[Listener] = []
    admin_listeners: list[Listener] = []
    try:
        try:
            if assignment is None:
                listeners = await open_listeners(config.listen)
            else:
                listeners = assignment.listeners()
            admin_listeners = await open_listeners(filter(None, [config.admin]))
        except OSError:
            if is_new:
                with contextlib.suppress(OSError):
                    config.store.directory.rmdir()
            raise
        async with anyio.create_task_group() as tasks:
            await tasks.start(ending.watch_signals, tasks.cancel_scope)
            if assignment is not None:
                tasks.start_soon(ending.with_parent, assignment, tasks.cancel_scope)
            admin = Admin(Pages(ending.health, make_registry(collector)))
            tasks.start_soon(admin.serve, admin_listeners)
            async with SegmentStore.open(config.store) as store:
                server = ending.server = Server(config, store)
                collector.source = attrs.evolve(
                    source, shared=server.shared, recovery_seconds=store.recovery_seconds
                )
                ending.health.trouble = lambda: store.trouble
                await _serve(config, server, store, listeners, admin_listeners, ending)
            tasks.cancel_scope.cancel()
    finally:
        close_all((*listeners, *admin_listeners))
    log.info(
        "stopped: status %d", ending.status, extra={"data": {"event": "stopped", "status": ending.status}}
    )
    return ending.status


async def _serve(
    config: GatewayConfig,
    server: Server,
    store: SegmentStore,
    listeners: Sequence[Listener],
    admin_listeners: Sequence[Listener],
    ending: "_Ending",
) -> None:
    if ending.is_asked:
        return
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve, listeners)
        ending.health.stage = Condition.READY
        endpoints = " ".join(str(listener.endpoint) for listener in listeners)
        _tell_what_is_served(config, server, store, endpoints, admin_listeners)
        print(f"ready {endpoints}", flush=True)
        notify("READY=1", f"STATUS=serving {endpoints}")


@attrs.define(eq=False)
class _Ending:
    """The first signal drains, the second cuts."""

    health: Health = attrs.field(factory=Health)
    server: Server | None = None
    is_asked: bool = False
    status: int = EXIT_OK

    async def watch_signals(
        self, scope: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        """Until cancelled. The second signal cancels `scope`."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if self.is_asked:
                    log.warning(
                        "%s again: cutting all connections",
                        name,
                        extra={"data": {"event": "cutting", "signal": name}},
                    )
                    self.status = EXIT_SIGNAL + number
                    scope.cancel()
                    return
                self.is_asked = True
                self.health.stage = Condition.DRAINING
                notify("STOPPING=1", "STATUS=draining")
                log.info("%s: draining", name, extra={"data": {"event": "draining", "signal": name}})
                if self.server is not None:
                    self.server.drain()

    async def with_parent(self, assignment: Assignment, scope: anyio.CancelScope) -> None:
        """When a worker's parent is gone, at once."""
        await assignment.parent_gone()
        log.error("the gateway's first process is gone: ending", extra={"data": {"event": "orphaned"}})
        self.status = EXIT_FAILURE
        scope.cancel()


def _look_at_directory(config: GatewayConfig) -> bool:
    """Whether it had to be made. Raises StorageError if it cannot be a store's, and leaves it as it is."""
    directory = config.store.directory
    is_new = not os.path.lexists(directory)
    if not is_new and not directory.is_dir():
        raise StorageError(f"{directory} is not a directory")
    device = FileDevice(directory, max_command_bytes=config.store.max_command_bytes)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise StorageError(f"{directory} cannot be read and written by this user")
    check_place(device)
    return is_new


def _tell_what_is_served(
    config: GatewayConfig,
    server: Server,
    store: SegmentStore,
    endpoints: str,
    admin_listeners: Sequence[Listener],
) -> None:
    stats = store.stats()
    facts = {
        "data": str(config.store.directory),
        "capacity_bytes": stats.capacity_bytes,
        "boot_id": server.boot_id.hex(),
        "objects": stats.objects,
        "object_bytes": stats.object_bytes,
    }
    for account in stats.accounts:
        log.info(
            "tenant %s: %d objects, %d bytes, %s",
            account.name,
            account.objects,
            account.used_bytes,
            "no quota" if account.quota_bytes is None else f"quota {account.quota_bytes}",
            extra={"data": {"event": "tenant", **attrs.asdict(account)}},
        )
    for listener in admin_listeners:
        admin = _url(listener.endpoint)
        log.info("admin port: %s", admin, extra={"data": {"event": "admin_port", "endpoint": admin}})
    log.info(
        "serving %s: %s",
        endpoints,
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        extra={"data": {"event": "serving", "endpoints": endpoints, **facts}},
    )
    quota_bytes = sum(account.quota_bytes or 0 for account in stats.accounts)
    if quota_bytes > stats.capacity_bytes // 2:
        log.warning(
            "the quotas are %d bytes together, above half of the capacity: a busy tenant may cost "
            "others their coldest objects",
            quota_bytes,
        )


def _url(endpoint: Endpoint) -> str:
    text = str(endpoint)
    return f"http://{text.removeprefix('tcp://')}" if text.startswith("tcp://") else text
