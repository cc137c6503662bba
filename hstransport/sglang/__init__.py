"""The plugin: all that names SGLang's internals is in this package.

Nothing else of hstransport imports SGLang or names what is in it, except ``client/engine_host.py``,
which starts its Engine. So a new release is checked against these files (docs/releases.md), and the
rest needs no SGLang to be tested. SGLang finds ``hooks.register`` through the entry-point group
``sglang.srt.plugins`` (0.5.11 and later; see ``hstransport.patched`` for earlier ones).
"""
