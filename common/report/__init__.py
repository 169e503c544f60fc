"""What people read: tables for the terminal, parts of READMEs, and the colours of all figures.

display    tables and panels in the terminal          theme     colours, and figures as SVG
evidence   what a rung changes, for its README        markers   the part of a README that a tool writes
spills     the page on register spills

ladder_tables    what is said of a rung's figures, and one run of the ladder in the terminal
"""
