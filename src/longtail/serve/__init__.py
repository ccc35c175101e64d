"""How requests come in: our server, the gateway, and plug-ins for vLLM and SGLang."""
