"""The link between machines."""

import os

# gRPC reads these when it is imported. It would write a line to standard error for every stranger that knocks.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Its fork handlers crash children that never use gRPC, such as a DataLoader's workers.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
