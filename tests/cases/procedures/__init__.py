"""Procedures: load, departures and faults that one request file cannot bring about."""
