"""The contracts of ADP/1, to be tried on any gateway and on any client.

    report = await check_gateway_contract(dial)
    assert report.is_kept, report

    report = await check_client_contract(run_client)

Each contract is a list of clauses; a clause is one sentence of docs/spec/adp-1.md and a way to find out. For
a gateway that is a process somewhere: `python -m adp_client.testing.conformance tcp://HOST:PORT`.
"""

from .clause import Clause as Clause
from .clause import Level as Level
from .clause import Report as Report
from .clause import Result as Result
from .clause import Verdict as Verdict
from .client_contract import CLIENT_CLAUSES as CLIENT_CLAUSES
from .client_contract import check_client_contract as check_client_contract
from .client_contract import run_adp_client as run_adp_client
from .gateway_contract import GATEWAY_CLAUSES as GATEWAY_CLAUSES
from .gateway_contract import NoGateway as NoGateway
from .gateway_contract import check_gateway_contract as check_gateway_contract
from .scene import ClientUnderTest as ClientUnderTest
from .scene import Dial as Dial
from .scene import RunClient as RunClient
