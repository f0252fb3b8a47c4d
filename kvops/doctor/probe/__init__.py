"""Moves real bytes between two NIXL agents, checks every one of them, and says how fast and over what they went.

Two processes of their own hold the agents (``side``), so that a crash, a hang or an abort inside NIXL or UCX is a
finding and not the end of kvops. They talk over one connected socket (``channel``, ``messages``) that carries requests
and NIXL metadata only; the bytes go the way NIXL chooses. ``run`` starts, watches and ends them.
"""
