"""Measurements, side by side in one run. Nothing here is part of the package."""
