"""What people read: every table, section, chart, picture and page.

tables     tables for the terminal and in Markdown     formats    how figures are spelled
sections   what tools write into documents             templates  the text of pages, filled in by `templating`

display    runs and contests                           listing        what there is to run
diagnosis  what limits a kernel                        difference     what one rung has over another
accuracy   errors over families of inputs              ladder_tables  the ladder, rung by rung
sass       machine code                                neighbours     how far rungs are apart, in lines of code
masks      the blocks of keys that a mask costs

charts     what was measured, by matplotlib            pictures   what code does, drawn by hand
pages      the sections of Markdown pages              dashboard  results/dashboard.html
"""
