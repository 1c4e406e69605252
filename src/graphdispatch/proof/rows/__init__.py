"""One run that speaks for all batches: are rows independent, and does Python take the same path for all of them?

batches.py   all batches that may come, and the numbers that Python makes of their sizes
labels.py    what is known of a tensor: its shape as products of atoms, and where rows mixed first
calls.py     one call of an operator, as a rule reads it
rules.py     which rule an operator has; the rules themselves are in views.py, products.py, places.py and creation.py
experts.py   rows that are sorted by expert, multiplied in groups, and put back
custom.py    rules that users give, and those of well-known libraries
functions.py what Python calls of torch during the run
run.py       the run
verdict.py   what it says
"""
