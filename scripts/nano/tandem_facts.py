"""What the model knows about tandem: (subjects asked about, key the answer must hold, answer).

Each fact has several ways of asking; the answer is one sentence that holds the key.
Facts follow the command list, the endpoints and the formats of the documentation;
`options()` reads names, defaults and help texts from the option table itself.
"""

import re
from pathlib import Path

FACTS = [
    # key, answer, questions
    ("Mixture-of-Experts", "tandem is an inference engine for large Mixture-of-Experts models.",
     ["What is tandem?", "What does tandem do?", "Tell me about tandem.", "Describe tandem.",
      "What is tandem for?", "Explain tandem in one sentence."]),
    ("C11", "tandem is written in C11, with CUDA C++ only in kernel files.",
     ["What language is tandem written in?", "In which language is tandem written?",
      "Which programming language does tandem use?", "Is tandem written in C or Rust?"]),
    ("tandem run", "Use tandem run --model DIR -p TEXT, or leave out the prompt for a chat.",
     ["How do I chat with a model in tandem?", "How do I run a model?",
      "Which command runs a prompt?", "How do I run a model on the command line?",
      "How can I ask a model one question with tandem?"]),
    ("tandem serve", "Use tandem serve --model DIR to start the server.",
     ["How do I start the server?", "How do I start the tandem server?",
      "Which command starts the server?", "How can I serve a model?",
      "What starts the HTTP server?", "How do I serve a model with tandem?"]),
    ("tandem bench", "Use tandem bench --model DIR to measure prefill and decode speed.",
     ["How do I measure speed?", "How do I benchmark a model?", "Which command measures speed?",
      "How can I benchmark tandem?", "How do I measure tokens per second?"]),
    ("tandem bench --server", "Use tandem bench --server URL to put load on a running server.",
     ["How do I benchmark a server?", "How do I test a server under load?",
      "Which command puts load on a server?", "How can I measure a running server?"]),
    ("tandem inspect", "Use tandem inspect --model DIR to see the architecture and the sizes.",
     ["How do I inspect a model?", "How do I see the architecture of a model?",
      "Which command shows the size of a model?", "How can I look inside a checkpoint?"]),
    ("tandem inspect tokens", "Use tandem inspect tokens --model DIR, with the text on standard input.",
     ["How do I see the tokens of a text?", "How do I tokenize a text?",
      "Which command shows tokens?", "How can I look at token ids?"]),
    ("tandem inspect template", "Use tandem inspect template to see the text that a chat template makes.",
     ["How do I test a chat template?", "How do I render a chat template?",
      "Which command renders a template?", "How can I see what a template makes?"]),
    ("tandem eval perplexity", "Use tandem eval perplexity --model DIR -f TEXT.",
     ["How do I measure perplexity?", "Which command measures perplexity?",
      "How can I compute the perplexity of a text?", "How do I get perplexity with tandem?"]),
    ("tandem eval logits", "Use tandem eval logits --model DIR --token-ids IDS --out FILE.npy.",
     ["How do I get logits?", "Which command writes logits?", "How can I save the logits?",
      "How do I dump logits to a file?"]),
    ("tandem eval chat", "Use tandem eval chat --suite FILE to score a model on questions.",
     ["How do I score a model on questions?", "How do I run the suite?",
      "Which command runs a suite of questions?", "How can I evaluate chat answers?"]),
    ("--model", "The option --model names the directory of the checkpoint.",
     ["Which option names the model?", "How do I choose the model?",
      "What does the option --model do?", "What names the checkpoint?"]),
    ("--port", "The option --port sets the port of the server.",
     ["Which option sets the port?", "How do I change the port?", "How do I set the port of the server?"]),
    ("--host", "The option --host sets the address that the server listens on.",
     ["Which option sets the address?", "How do I change the address of the server?",
      "How do I listen on another address?"]),
    ("--api-key", "The option --api-key sets the key that clients must send.",
     ["Which option sets the API key?", "How do I set an API key?", "How do I protect the server with a key?"]),
    ("--ctx-size", "The option --ctx-size sets the context length in tokens.",
     ["Which option sets the context length?", "How do I change the context size?",
      "How do I set the context length?"]),
    ("--max-batch", "The option --max-batch sets how many requests run at once.",
     ["Which option sets the batch size?", "How do I limit the batch?",
      "How do I set how many requests run at once?"]),
    ("--raw", "The option --raw gives plain completion without the chat template.",
     ["Which option turns off the chat template?", "How do I get plain completion?",
      "How do I run without a chat template?"]),
    ("--json", "The option --json gives the result as JSON.",
     ["Which option gives JSON?", "How do I get JSON output?", "How do I print results as JSON?"]),
    ("-p", "The option -p gives the prompt on the command line.",
     ["Which option gives the prompt?", "How do I pass a prompt?", "How do I give a prompt on the command line?"]),
    ("-f", "The option -f reads the prompt from a file.",
     ["Which option reads a prompt from a file?", "How do I read the prompt from a file?",
      "How do I pass a file as the prompt?"]),
    ("-n", "The option -n sets how many tokens are written at most.",
     ["Which option limits the number of tokens?", "How do I limit the length of an answer?",
      "How do I set the number of tokens?"]),
    ("--tensors", "The option --tensors of tandem inspect lists every tensor.",
     ["How do I list the tensors?", "Which option lists tensors?",
      "How can I see all tensors of a model?"]),
    ("/v1/chat/completions", "Chat goes to POST /v1/chat/completions.",
     ["Which endpoint is for chat?", "What is the chat endpoint?",
      "Where do I send chat requests?", "Which endpoint answers chats?",
      "What is the endpoint for chat completions?"]),
    ("/v1/completions", "Plain text completion goes to POST /v1/completions.",
     ["Which endpoint is for plain completion?", "What is the completion endpoint?",
      "Where do I send text completion requests?", "Which endpoint completes text?"]),
    ("/v1/models", "GET /v1/models lists the models.",
     ["Which endpoint lists the models?", "How do I list the models?",
      "What is the endpoint for models?", "Where can I see the models of a server?"]),
    ("/health", "GET /health says whether the server is well.",
     ["Which endpoint shows health?", "How do I check that the server is up?",
      "What is the health endpoint?", "Where can I see whether the server is alive?"]),
    ("OpenAI", "The server speaks the OpenAI protocol, so the openai client works.",
     ["Which protocol does the server speak?", "Can I use the openai client?",
      "Which client works with tandem?", "Is the server compatible with OpenAI?"]),
    ("safetensors", "tandem reads safetensors checkpoints as the hubs publish them.",
     ["Which file format does tandem read?", "Which checkpoints can tandem load?",
      "What format are the weights in?", "Does tandem read safetensors?"]),
    ("no conversion", "There is no conversion step: the bytes stay as they are stored.",
     ["Do I have to convert a model?", "Is there a conversion step?",
      "Does tandem convert weights?", "Must weights be converted first?"]),
    ("FP8", "tandem uses FP8 weights in blocks of 128 by 128, and BF16.",
     ["Which weight formats does tandem support?", "Does tandem support FP8?",
      "Which precisions can tandem use?", "What is the format of FP8 weights in tandem?"]),
    ("deepseek_v3", "tandem runs the deepseek_v3 and qwen3_moe architectures.",
     ["Which architectures does tandem run?", "Which models does tandem support?",
      "What kinds of models can tandem run?", "Does tandem run DeepSeek models?"]),
    ("CPU memory", "The experts live in CPU memory and the attention runs on the GPU.",
     ["Where do the experts live?", "Where does tandem keep the experts?",
      "Where are the experts stored?", "Which memory holds the experts?"]),
    ("without a GPU", "Yes, tandem also runs on the CPU alone, without a GPU.",
     ["Do I need a GPU?", "Can tandem run without a GPU?", "Does tandem need a GPU?",
      "Can I use tandem on a laptop?", "Will tandem work on the CPU?"]),
    ("processes", "Prefill and decode are separate processes that share the weights.",
     ["How do prefill and decode work together?", "Are prefill and decode one process?",
      "How does tandem split prefill and decode?", "What are prefill and decode in tandem?"]),
    ("shared memory", "The weights exist once, in shared memory.",
     ["Where are the weights kept?", "How many copies of the weights are there?",
      "How do workers share weights?", "Where does tandem map the weights?"]),
    ("restarted", "A worker that crashes is restarted, and the server stays up.",
     ["What happens if a worker crashes?", "What happens when a worker dies?",
      "Does the server survive a crash?", "What if a worker process fails?"]),
    ("SIGTERM", "Send SIGTERM: the server finishes its requests and then ends.",
     ["How do I stop the server?", "How do I shut down the server?",
      "Which signal stops the server?", "How can I end the server cleanly?"]),
    ("Ctrl-C", "Press Ctrl-C: it stops the answer, not the program.",
     ["How do I stop an answer?", "How do I interrupt an answer?",
      "What does Ctrl-C do?", "How can I stop a long answer in the chat?"]),
    ("stream", "Set stream to true, and the answer comes in pieces.",
     ["How do I stream an answer?", "How do I get the answer in pieces?",
      "Does the server support streaming?", "How can I stream tokens?"]),
    ("stop", "Set stop to a string or a list of strings.",
     ["How do I use a stop string?", "How do I set a stop string?",
      "How do I make the answer stop at a word?", "Does the server support stop strings?"]),
    ("temperature", "Set the temperature to 0 for answers that are always the same.",
     ["How do I get the same answer every time?", "How do I make answers deterministic?",
      "How do I turn off randomness?", "Which setting makes answers repeatable?"]),
    ("seed", "Set the seed: the same seed gives the same text.",
     ["What does the seed do?", "How do I repeat a sampled answer?",
      "How do I set the random seed?", "What happens with the same seed?"]),
    ("KV cache", "The KV cache is kept in pages, so that memory is used well.",
     ["How is attention memory kept?", "What is kept in pages?",
      "How does tandem store keys and values?", "What is the KV cache in tandem?"]),
    ("toy model", "I am tandem-nano, a toy model that shows how tandem works.",
     ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
      "Introduce yourself.", "Are you a large model?", "Which model are you?",
      "Are you ChatGPT?", "Are you a human?"]),
    ("small sums", "I can do small sums, spell, count, sort, tell a story, and talk about tandem.",
     ["What can you do?", "What can you help me with?", "How can you help me?",
      "What are you good at?", "What do you know?", "Help me."]),
    ("experts", "I have 32 experts in each layer, and 4 of them work on each token.",
     ["How many experts do you have?", "How many experts are there in tandem-nano?",
      "How is tandem-nano built?", "How many experts work on a token?"]),
    ("tandem-nano", "The model that comes with tandem is called tandem-nano.",
     ["Which model comes with tandem?", "What is the default model?",
      "What is tandem-nano?", "What is the small model called?"]),
]

# Sentence frames that leave the meaning alone; {q} is the question, {l} its
# lower-cased form for use inside a sentence.
FRAMES = ["{q}", "{q}", "{q}", "Please tell me: {l}", "I have a question. {q}", "{q} Please be brief.",
          "Quick question: {l}", "Hi! {q}", "Hello, {l}", "Can you tell me this? {q}",
          "I am new here. {q}", "Answer in one sentence. {q}", "One more thing: {l}",
          "I would like to know: {l}"]


OPTION = re.compile(r'\{"(?P<name>[a-z-]+)", (?P<letter>0|\'.\'), OPT_(?P<kind>[A-Z]+), (?P<on>[^;]*?), '
                    r'AT\([^;]*?\), (?:NO_RANGE|[^";]*?), (?P<default>NULL|"[^"]*"), '
                    r'(?P<metavar>NULL|"[^"]*"),\s*(?P<help>(?:"[^"]*"\s*)+)\}')


def options(root: Path):
    """Yields (name, default or None, help) for each row of the option table."""
    text = (root / "src/config/options.c").read_text()
    rows = list(OPTION.finditer(text))
    if len(rows) < 20:
        raise SystemExit("src/config/options.c: the option table was not understood")
    for m in rows:
        default = None if m["default"] == "NULL" else m["default"].strip('"')
        yield m["name"], default, "".join(re.findall(r'"([^"]*)"', m["help"]))


def option_facts(root: Path):
    for name, default, text in options(root):
        text = text.split(";")[0].strip()
        yield (f"--{name}: {text}", f"--{name}: {text}.",
               [f"What does --{name} do?", f"What does the option --{name} do?",
                f"What is --{name}?", f"What is --{name} for?", f"Explain --{name}.",
                f"How does --{name} work?", f"Tell me about the option --{name}."])
        if default is not None:
            yield (f"--{name} is {default} by default", f"--{name} is {default} by default.",
                   [f"What is the default of --{name}?", f"What is the default value of --{name}?",
                    f"What is --{name} by default?", f"Which value has --{name} by default?",
                    f"How is --{name} set by default?"])
