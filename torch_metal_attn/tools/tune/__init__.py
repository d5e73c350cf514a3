"""Tiles that were measured: `tune`, the tables that it writes, and how they are used."""
