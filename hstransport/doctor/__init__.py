"""``hstransport doctor``: are the states that a running server hands out the right ones?

    server ── probes: a few requests ──▶ samples ──▶ checks ──▶ one Finding each

:mod:`place` finds the server's rings, :mod:`probe` asks, :mod:`samples` waits for what was stored,
:mod:`checkpoint` and :mod:`reference` know what it should be, :mod:`checks` compare.
"""
