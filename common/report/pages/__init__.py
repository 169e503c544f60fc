"""What tools write into Markdown pages.

ladder      the ladder in full, and its charts     readme    the README's short table of it
cells       rungs beside official kernels, cell by cell
evidence    what a rung changes, on its page           spills    what tiles of 128 rows spill
references  the references, on theirs                  accuracy  how exact kernels are
"""
