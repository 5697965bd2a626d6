"""Opens the registry that an address names: an embedded one, or an etcd cluster."""

import os
import ssl
from collections.abc import Mapping

from atoll.errors import ConfigError
from atoll.link.net.embedded_client import EmbeddedRegistry
from atoll.link.net.etcd import EtcdRegistry
from atoll.link.net.etcd_gateway import EtcdOptions
from atoll.link.net.identity import Identity
from atoll.link.net.registry import INSECURE, Insecure, Registry

ETCD = "etcd://"
CA, CERTIFICATE, KEY = "ATOLL_ETCD_CA", "ATOLL_ETCD_CERT", "ATOLL_ETCD_KEY"
"""Environment variables with paths of PEM files: the cluster's authority, and a client certificate if it wants one."""
USER, PASSWORD = "ATOLL_ETCD_USER", "ATOLL_ETCD_PASSWORD"


def open_registry(address: str, security: Identity | Insecure, environment: Mapping[str, str] = os.environ) -> Registry:
    """Connect to a registry.

    Args:
        address: HOST:PORT of `atoll registry`, or etcd://HOST:PORT,HOST:PORT/NAME.
        security: This process's identity, or "none". An etcd cluster has its own TLS and users, which the environment
            variables above name; ATOLL_ETCD_CA=none is for a cluster without TLS.
        environment: The environment variables.

    Raises:
        ConfigError: The address cannot be read, or a file cannot.
    """
    if not address.startswith(ETCD):
        return EmbeddedRegistry(address, security)
    more = {"user": environment.get(USER), "password": environment.get(PASSWORD)}
    authority = environment.get(CA, "")
    if authority == INSECURE or (security == INSECURE and not authority):
        return EtcdRegistry(EtcdOptions.read(address, INSECURE, **more))
    try:
        context = ssl.create_default_context(cafile=authority or None)
        if certificate := environment.get(CERTIFICATE):
            context.load_cert_chain(certificate, environment.get(KEY))
    except (OSError, ssl.SSLError) as fault:
        problem = f"{CA}, {CERTIFICATE} and {KEY} must be paths of PEM files ({fault})"
        raise ConfigError(problem, setting=CA, value=authority) from fault
    return EtcdRegistry(EtcdOptions.read(address, context, **more))
