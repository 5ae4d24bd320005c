"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`).

It only tells vLLM where our names live; nothing of the adapter is imported before a configuration selects it,
and an engine that does not use it must not notice that the package is installed.
"""

CONNECTOR_NAME = "ADPOffloadingConnector"
SPEC_NAME = "ADPOffloadingSpec"
_DOOR = "adp_engines.vllm.offloading.door"


def register() -> None:
    """Make the connector and the spec selectable by name. Idempotent: plugins may be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, _DOOR, CONNECTOR_NAME)
    if SPEC_NAME not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC_NAME, _DOOR, SPEC_NAME)
