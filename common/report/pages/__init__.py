"""What tools write into Markdown pages.

ladder      the ladder in full, and its charts         readme    the README's short table of it
documents   a rung's page                              accuracy    how exact kernels are
steps       what the ladder's largest run says of it   references  the references, on their pages
cell_page   rungs beside official kernels, in full     cell_overview  the README's short table of all ladders
limits      which rung runs for which option, and what is refused
"""
