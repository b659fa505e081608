"""One module for each system. It runs in that system's environment: `python -m chaos.peers.programs.NAME VERB`."""
