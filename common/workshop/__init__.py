"""New rungs: from a copy of another one to a logged verdict, and exercises; and whether this machine is fit for it.

scaffold     a new rung from another       watch    a trial at each save
trial        what one run of it gives      verdict  whether it is a gain
tried        the log of what was tried     exercises/  a rung with its idea taken out, a task and a grade
machine      what is here, what lacks, and what mends it
"""
