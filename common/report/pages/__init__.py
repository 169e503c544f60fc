"""What tools write into Markdown pages.

readme      the README's ladder: charts and tables     cells     rungs beside official kernels, cell by cell
evidence    what a rung changes, on its page           spills    what tiles of 128 rows spill
references  the references, on theirs                  accuracy  how exact kernels are
"""
