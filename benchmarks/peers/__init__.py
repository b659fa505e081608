"""The peers: what each adapter shares (harness.py), and one folder of pinned requirements per peer."""
