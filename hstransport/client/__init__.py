"""Asking a server for many prompts' states: prompts, chat templates, HTTP, resume, progress.

prompts (chat) → extract → http
                    └────→ stored → hstransport_consumer.reader
"""
