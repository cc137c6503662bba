"""Asking for many prompts' states: chat templates, a server or an engine, resume, progress.

prompts (chat) → extract → ask → target (http: a server; engine: one of one's own, in engine_host)
                    └────→ stored → hstransport_consumer.reader
"""
