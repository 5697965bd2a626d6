"""The link between machines."""

import os

# gRPC would write a line to standard error for every stranger that knocks; it reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
