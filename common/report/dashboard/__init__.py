"""Pictures and tables of what was measured, from the CSV logs alone.

data      the logs as data frames
figures   the ladder, the roofline, the instruction mix, ...  page      the HTML page (page.html, page.css, page.js)
readme    the README's table and chart
cells     the fastest rung beside the fastest official kernel, by head_dim, mask and length
"""
