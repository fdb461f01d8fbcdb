"""Streamed experts against resident ones, for every architecture."""
