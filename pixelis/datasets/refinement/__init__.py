"""From raw demonstrations to a data set: difficulty, quality, duplicates, filters, gates, recipes.

Pure functions, no Ray.
"""
