"""Tasks for agents, with a human's approval: `./dev demo agent_tasks`, or `python -m examples.agent_tasks`.

schema.sql   conversations, their messages, and the tasks with a status of their own
tasks.py     the task: what may follow what, and the events that say so; they carry the task's id and nothing else
tools.py     what an agent can do
office.py    the handlers: a dispute opens a conversation, a task is executed, its result goes back, it is forgotten
desk.py      what people do: approve, refuse, cancel
"""
