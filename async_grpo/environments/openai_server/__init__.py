"""The server of OpenAI's API for agents.

The files, in the order in which a request passes through them:

    endpoint.py            the server, its keys and paths
    request_body.py        reads the body, within limits
    request_faults.py      checks the fields, and names all faults (unsupported_fields.py: what is refused or ignored)
    open_trajectory.py     the trajectory that the key opens
    openai_api.py          requests and answers of chat completions and completions
    responses_api.py       the Responses API: responses_request.py, stored_responses.py and responses_answer.py
    event_stream.py        sends an answer as a stream of events
"""
