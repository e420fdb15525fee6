"""Measurements of the step against what it replaces: the engines, the grid, its rows and plots."""
