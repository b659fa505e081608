"""The peers: one folder of pinned requirements for each. Their adapters stand in `systems`."""
