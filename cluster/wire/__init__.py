"""The data plane: frames between the stages' processes, over sockets that prove who they are. No Ray."""
