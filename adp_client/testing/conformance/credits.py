"""Section 5.12, feature CREDITS."""

from adp_client.protocol.constants import Feature

from .clause import Chapter, Level, expect
from .trial import Trial, content

CREDITS: Chapter[Trial] = Chapter()


@CREDITS.clause("5.12-credit", level=Level.FULL, needs=Feature.CREDITS)
async def credit(trial: Trial) -> None:
    """A CREDIT is for at least one request and not above the window that WELCOME told, and requests go on."""
    (key,) = trial.keys(1)
    peer = await trial.connect(features=Feature.FRAGMENTS | Feature.CREDITS)
    for number in range(10):  # the protocol's core judges every CREDIT that comes meanwhile
        data = content(1000, number)
        await trial.store(peer, [(key, data)])
        expect("READ with credits", [data], await trial.read(peer, [key], capacity=1000))
