"""One run that speaks for all batches: are rows independent, and does Python take the same path for all of them?

batches.py     all batches that may come, and the numbers that Python makes of their sizes
labels.py      what is known of a tensor: its shape as products of atoms, and where rows mixed first
calls.py       one call of an operator, as a rule reads it
rule_text.py   rules as text: which dimensions pair, are kept, or go into each other
rules.py       which rule an operator has; the table is in elementwise.py, products.py, views.py, creation.py, places.py
               (what a tensor names) and experts.py (rows that are sorted by expert, and put back)
slots.py       state that rows write at places which they name
custom.py      rules that users give, and those of well-known libraries
functions.py   what Python calls of torch during the run
scripts.py     what runs past torch's modes
run.py         the run
verdict.py     what it says
"""
