"""What tools write into Markdown pages.

ladder      the ladder in full, and its charts         readme    the README's short table of it
documents   a rung's page                              accuracy    how exact kernels are
steps       what the ladder's largest run says of it   references  the references, on their pages
cells       rungs beside official kernels, cell by cell
limits      which rung runs for which option, and what is refused
"""
