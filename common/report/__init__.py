"""What people read: every table, section, chart, picture and page.

tables     tables for the terminal and in Markdown     formats    how figures are spelled
sections   what tools write into documents             templates  the text of pages, filled in by `templating`

display    runs and contests                           listing    what there is to run
sass       machine code
diagnosis  what limits a kernel                        neighbours how far rungs are apart, in lines of code
accuracy   errors over families of inputs              ladder_tables  the ladder, rung by rung

charts     what was measured, by matplotlib            pictures   what code does, drawn by hand
pages      the sections of Markdown pages              dashboard  results/dashboard.html
"""
