"""The event log every part writes and every report reads. Imports nothing else of TriScale, and no torch."""

from .log import EventWriter, current_events, read_events
from .schema import KINDS, VERSION, Event, check_event

__all__ = ["KINDS", "VERSION", "Event", "EventWriter", "check_event", "current_events", "read_events"]
