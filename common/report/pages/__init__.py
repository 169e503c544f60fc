"""What tools write into Markdown pages.

ladder      the ladder in full, and its charts         readme    the README's short table of it
documents   a rung's page and its evidence             spills    what tiles of 128 rows spill
steps       what the ladder's runs say of a rung       accuracy  how exact kernels are
evidence    what a rung changes in machine code        references  the references, on their pages
cells       rungs beside official kernels, cell by cell
limits      which rung runs for which option, and what is refused
"""
