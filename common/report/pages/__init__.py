"""What tools write into Markdown pages.

readme      the README's ladder: charts and tables     cells     rungs beside official kernels, cell by cell
documents   a rung's page and its evidence             spills    what tiles of 128 rows spill
steps       what the ladder's runs say of a rung       accuracy  how exact kernels are
evidence    what a rung changes in machine code        references  the references, on their pages
"""
