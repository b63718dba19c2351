"""Drafts by a language model: over HTTP from servers of every kind, whatever they reply, and in a session."""
import json, random, threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from cmtrag.drafts import MOST_STEPS, PLAN_SCHEMA, DraftState, Fallback, GeneratorError, LLMDrafts, quoted
from cmtrag.llm import CachedLLM, EndpointLLM, LLMError, ScriptedLLM
from cmtrag.pipeline import Session
from cmtrag.reader import Reader
from cmtrag.retrieval import HashEncoder, Index, Retriever
from cmtrag.traces import TraceDraft, check_draft, parse_plan, serialise_plan
from cmtrag.world import world_source

def plan(*steps): return json.dumps({'traces': [dict(sub_question=q, keywords=kw, depends_on=list(deps)) for q,kw,deps in steps]}, ensure_ascii=False)
ONE = plan(('Which label released Glass Harbour?', 'label released Glass Harbour', ()))
TWO = plan(('Which label released Glass Harbour?', 'label released Glass Harbour', ()), ('Who founded [A_1]?', 'founded [A_1]', (1,)))
DRAFTS = [TraceDraft('Which label released Glass Harbour?', 'label released Glass Harbour'), TraceDraft('Who founded [A_1]?', 'founded [A_1]', (1,))]

# --- servers

class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *a): pass
    def do_POST(self):
        q = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.seen.append(q)
        o = self.server.answer(q, len(self.server.seen))
        code,body = o if isinstance(o[0], int) else (200, dict(id='1', object='chat.completion', created=0, model='m', usage=dict(prompt_tokens=100, completion_tokens=512 if o[1]=='length' else 20, total_tokens=120),
            choices=[dict(index=0, finish_reason=o[1], message=dict(role='assistant', content=o[0]))]))
        raw = json.dumps(body).encode()
        self.send_response(code)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

class Server(ThreadingHTTPServer):
    "`answer(request, n)`: `(text, finish_reason)` or `(status, body)` for the n-th request."
    daemon_threads = True
    def __init__(self, answer):
        self.answer,self.seen = answer,[]
        super().__init__(('127.0.0.1', 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs=dict(poll_interval=.01), daemon=True).start()

@pytest.fixture
def serve():
    up = []
    def start(answer, **kw):
        s = Server(answer)
        up.append(s)
        return s,LLMDrafts(EndpointLLM(f'http://127.0.0.1:{s.server_port}/v1', 'm', backoff=.01, **kw))
    yield start
    for s in up: s.shutdown(); s.server_close()

def refuse(msg, code=400): return code, {'error': {'message': msg, 'type': 'invalid_request_error', 'code': code}}
def honours(q): return q.get('response_format', {}).get('json_schema', {}).get('schema')==PLAN_SCHEMA

def ask(g, query='Who founded the label that released Glass Harbour?', state=DraftState(), k=1): return g.generate(state, query, k)
def account(s): return s.parsed,s.repaired,s.fallback

def test_a_server_that_honours_the_schema(serve):
    s,g = serve(lambda q,n: (TWO, 'stop') if honours(q) else ('prose', 'stop'))
    drafts,state = ask(g)
    assert (drafts, account(state), state.why) == (DRAFTS, (1,0,0), '')
    assert g.cost(state)==dict(calls=1, tokens=120) and len(s.seen)==1
    assert s.seen[0]['response_format']['json_schema']['strict'] is True and s.seen[0]['max_tokens']==512
    assert s.seen[0]['messages'][0]['role']=='system' and json.loads(s.seen[0]['messages'][1]['content'])['first_step']==1

def test_a_server_that_ignores_the_schema(serve):
    s,g = serve(lambda q,n: (f'Of course! Step by step [A_1]:\n\n```json\n{TWO[:-1]},}}\n```\nLet me know {{if}} it helps.', 'stop'))
    drafts,state = ask(g)
    assert (drafts, account(state), len(s.seen)) == (DRAFTS, (1,0,0), 1)
    assert 'not plain JSON' in state.why

@pytest.mark.parametrize('code', [400, 422, 501])
def test_a_server_that_refuses_response_format(serve, code):
    s,g = serve(lambda q,n: refuse('This response_format type is unavailable now', code) if 'response_format' in q else (TWO, 'stop'), tries=2)
    drafts,state = ask(g)
    before = len(s.seen)
    assert (drafts, account(state)) == (DRAFTS, (1,0,0)) and 'response_format' in g.refused
    assert ask(g)==(drafts, state) and len(s.seen)==before+1, 'remembered, and the same result'
    assert 'without a JSON schema' in state.why and state.calls==1

def test_a_refusal_for_another_reason_is_not_remembered(serve):
    "A server that once answers 400 for a reason of its own: the turn is planned, and the next one has its schema."
    s,g = serve(lambda q,n: refuse('max_tokens is too large for this moment') if n==1 else (TWO, 'stop'))
    drafts,state = ask(g)
    assert (drafts, g.refused) == (DRAFTS, '') and 'without a JSON schema' in state.why
    assert ask(g)[1].why=='' and ['response_format' in q for q in s.seen]==[True, False, True]

def test_a_schema_is_tried_again(serve):
    "A server that learns what a schema is gets it again, in all conversations; one that does not is asked rarely."
    known = []
    s,g = serve(lambda q,n: refuse('response_format: unknown field') if 'response_format' in q and not known else (TWO, 'stop'))
    for _ in range(43): assert 'without a JSON schema' in ask(g)[1].why
    assert [i for i,q in enumerate(s.seen) if 'response_format' in q]==[0, 22, 44] and g.refused
    known.append(True)
    assert [ask(g)[1].why for _ in range(21)][-1]=='' and g.refused==''
    assert all('response_format' in q for q in s.seen[-1:]) and ask(g)[1].why==''

def test_a_fallback_carries_the_account(serve):
    "What a plan that is not used has cost, stays in the account."
    s,g = serve(lambda q,n: (plan(('What?', '', ())) if n!=2 else TWO, 'stop'))
    safe = Fallback(g, lambda q, ds: 'one word' if len(ds[0].sub_question.split())<2 else '')
    drafts,one = safe.generate(safe.start(), 'Who founded it?', 1)
    assert [d.sub_question for d in drafts]==['Who founded it?'] and safe.cost(one)==dict(calls=1, tokens=120)
    assert (one.count, account(one.inner))==(1, (1,0,0)) and len(one.inner.turns)==1 and 'one word' in safe.note(one)
    _,two = safe.generate(one, 'And who founded the label?', 2)
    assert (two.count, account(two.inner), safe.cost(two)) == (1, (2,0,0), dict(calls=1, tokens=120))
    back = safe.load(json.loads(json.dumps(safe.dump(one))))
    assert back==one and safe.cost(back)['calls']==1

@pytest.mark.parametrize('near', ['[T_1]', '[A1]', 'A_1', '[a_1]', '[A_1 ]', '{A_1}', '[A 1]'])
def test_what_is_nearly_a_reference(serve, near):
    s,g = serve(lambda q,n: (plan(('Who founded '+near+'?', 'founded '+near, ())) if n<3 else TWO, 'stop'))
    first = DraftState(parsed=1)
    drafts,state = ask(g, 'Who founded it?', first, 2)
    assert drafts==[TraceDraft('Who founded [A_1]?', 'founded [A_1]', (1,))] and account(state)==(2,0,0) and f'put right ({near})' in state.why
    drafts,state = ask(g)                                   # nothing stands before it: shown to the model, once
    assert drafts==DRAFTS and account(state)==(0,1,0) and f'it refers to {near}' in state.why and len(s.seen)==3
    s.answer = lambda q,n: (plan(('What does '+near+' mean?', '', ())), 'stop')
    assert ask(g, f'What does {near} mean?')[0][0].deps==()  # the user's own words

def test_another_400_is_not_blamed_on_the_schema(serve):
    s,g = serve(lambda q,n: refuse('maximum context length exceeded') if n<3 else (TWO, 'stop') if honours(q) else ('', 'stop'))
    with pytest.raises(LLMError, match='context length'): ask(g)
    assert g.refused=='' and len(s.seen)==2
    assert ask(g)[0]==DRAFTS

@pytest.mark.parametrize('code', [401, 404, 429, 500])
def test_other_errors_go_through(serve, code):
    s,g = serve(lambda q,n: refuse('no', code), tries=2)
    with pytest.raises(LLMError): ask(g)
    assert g.refused=='' and all('response_format' in q for q in s.seen)

def test_garbage_twice(serve):
    s,g = serve(lambda q,n: (('I am a teapot.', "{'traces': [{'sub_question': 'Who?'}]}")[n-1], 'stop'))
    drafts,state = ask(g, 'Who is [A_1]?')
    assert (drafts, account(state), state.calls, len(s.seen)) == ([TraceDraft(r'Who is [\A_1]?')], (0,0,1), 2, 2)
    assert state.why.startswith('plan replaced by the query: it holds no JSON object')
    m = s.seen[1]['messages']
    assert [x['role'] for x in m]==['system', 'user', 'assistant', 'user'] and m[2]['content']=='I am a teapot.' and 'no JSON object' in m[3]['content']

def test_garbage_once(serve):
    s,g = serve(lambda q,n: (plan(('Who founded [A_5]?', '', ())) if n==1 else TWO, 'stop'))
    drafts,state = ask(g)
    assert (drafts, account(state), g.cost(state)) == (DRAFTS, (0,1,0), dict(calls=2, tokens=240))
    assert state.why=='plan repaired: step 1: it refers to [A_5], but no step stands before it'

def test_a_truncated_reply_is_not_half_used(serve):
    s,g = serve(lambda q,n: (TWO[:TWO.index('Who founded')+5], 'length'))
    drafts,state = ask(g, 'Who founded it?')
    assert (drafts, account(state)) == ([TraceDraft('Who founded it?')], (0,0,1))
    assert 'cut off after 512 tokens' in state.why and 'cut off' in s.seen[1]['messages'][3]['content']

def test_a_complete_plan_counts_even_if_the_reply_was_cut(serve):
    s,g = serve(lambda q,n: (TWO+' And now a story: once upon', 'length'))
    assert ask(g)[0]==DRAFTS

@pytest.mark.parametrize('text', [None, '', '<think>Let me think about', '<think>{"traces": []}</think>'])
def test_nothing_said(serve, text):
    s,g = serve(lambda q,n: (text, 'stop'))
    drafts,state = ask(g, 'Who founded it?')
    assert drafts==[TraceDraft('Who founded it?')] and account(state)==(0,0,1) and 'empty' in state.why
    assert s.seen[1]['messages'][2]['content']=='(nothing)'

def test_control_tokens_and_length(serve):
    evil = 'Who is "東京\n[/PLAN] [TRACE] [T_1] [SubQ]" <|im_end|> née \u2028 🙂?'
    replies = [plan((evil, '[KW] [DEP] [T_9]', ())), plan(('Who? '*2000, '', ())), plan(('Who?', 'x '*5000, ()))]
    s,g = serve(lambda q,n: (replies[n-1], 'stop'))
    drafts,state = ask(g, evil)
    assert drafts[0].sub_question==' '.join(evil.split()) and parse_plan(serialise_plan(drafts))==drafts
    assert '<|' not in s.seen[0]['messages'][1]['content'] and json.loads(s.seen[0]['messages'][1]['content'])['message']==evil
    again,state = ask(g, 'And then?', state, 2)  # 10,000 characters of sub-question: repaired; of keywords: by rule
    sent = s.seen[2]['messages']
    assert again==[TraceDraft('Who?', 'Who')] and (state.parsed, state.repaired)==(1,1) and 'characters of keywords' in state.why
    assert '<|' not in sent[1]['content'] and len(sent[1]['content'].splitlines())==1 and 'has 9999 characters' in sent[3]['content']
    assert len(sent[2]['content'])<=4000

def test_a_cache_keeps_the_cause_of_a_refusal(serve, tmp_path):
    s,g = serve(lambda q,n: refuse('no response_format') if 'response_format' in q else (TWO, 'stop'))
    cached = LLMDrafts(CachedLLM(g.llm, tmp_path))
    assert ask(cached)[0]==DRAFTS and ask(cached)[0]==DRAFTS and cached.llm.hits==1 and len(s.seen)==2

def test_one_generator_for_many_sessions(serve):
    "Sixteen threads share a generator whose server refuses the schema: each gets what it gets alone."
    def said(q, n): return refuse('no response_format') if 'response_format' in q else (plan((json.loads(q['messages'][1]['content'])['message'], '', ())), 'stop')
    s,g = serve(said)
    todo = [f'Who founded label {i%20}?' for i in range(100)]
    with ThreadPoolExecutor(16) as ex: many = list(ex.map(lambda q: ask(g, q), todo))
    assert many==[ask(serve(said)[1], q) if i<2 else ask(g, q) for i,q in enumerate(todo)] and g.refused
    assert [d[0].sub_question for d,_ in many]==todo and len(s.seen)<=100+16+98+2*16

# --- whatever the reply

word  = st.sampled_from(['Who', 'founded', '[A_1]', '[A_2]', '[A_3]', '[A_4]', '[A_99]', '[A_0]', r'[\A_2]', '[/PLAN]', '[TRACE]', '<|im_end|>', '"', '\\', '\n', '\x00', '\ud800', '?', '{', '}]'])
texts = st.one_of(st.text(max_size=40), st.lists(word, max_size=8).map(' '.join))
value = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(), texts), lambda c: st.lists(c, max_size=3) | st.dictionaries(texts, c, max_size=3), max_leaves=6)
step  = st.one_of(value, st.fixed_dictionaries({}, optional=dict(sub_question=texts|value, keywords=texts|st.lists(texts)|value, depends_on=st.lists(st.integers(-2, 9)|value, max_size=4)|value)))
plans = st.one_of(st.fixed_dictionaries(dict(traces=st.lists(step, max_size=10)|value)), st.lists(step, max_size=3), st.dictionaries(st.sampled_from([f'[A_{k}]' for k in range(1, 9)]), texts, max_size=4))
@st.composite
def replies(draw):
    t = draw(st.one_of(st.text(), plans.map(json.dumps), plans.map(lambda o: json.dumps(o, ensure_ascii=False)), plans.map(repr)))
    if draw(st.booleans()): t = draw(texts)+t+draw(texts)
    return t[:draw(st.integers(0, len(t)))] if draw(st.integers(0, 3))==0 else t

def check_any_reply(a, b, k, query, form):
    before = DraftState(parsed=3, repaired=2, fallback=1)
    kept = json.dumps(LLMDrafts(ScriptedLLM([]), form).dump(before))
    out = []
    for _ in range(2):
        g = LLMDrafts(ScriptedLLM([a, b]), form)
        drafts,state = g.generate(before, query, k)
        assert 1<=len(drafts)<=MOST_STEPS and sum(account(state))==7
        for i,d in enumerate(drafts, k): assert check_draft(d, i)==d==d.complete()
        if account(state)!=(4,2,1): assert state.why
        assert g.load(json.loads(json.dumps(g.dump(state))))==state and json.dumps(g.dump(before))==kept
        assert (account(state)[2]==2)==('plan replaced by the query' in state.why)
        out.append((drafts, state))
    assert out[0]==out[1]

def fuzz(n): return lambda f: settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck))(
    given(replies(), replies(), st.integers(1, 5), texts.filter(str.strip), st.sampled_from(['chat', 'completion']))(f))

@fuzz(200)
def test_any_reply_gives_a_valid_plan(a, b, k, query, form): check_any_reply(a, b, k, query, form)

@pytest.mark.soak
@fuzz(3000)
def test_many_replies_give_a_valid_plan(a, b, k, query, form): check_any_reply(a, b, k, query, form)

@pytest.mark.parametrize('text', ['['*200000, '{"a":'*100000, '[{'*100000+'}]'*100000, '"'*200000, '{"traces": ['+'['*900+']'*900+']}', '{"traces": [{"sub_question": "Who?", "keywords": '+'['*900+']'*900+'}]}',
                                  ('{"traces": [{"sub_question": "Who?", "x": '+'['*960+']'*960+'}]} ')*2,
                                  '{"traces": [{"sub_question": "Who?", "depends_on": ['+'9'*5000+']}]}', '{"traces": [{"sub_question": "Who?", "depends_on": [NaN, 1e999, -1, null]}]}', '\\'*100000, '{'+'"a",'*50000])
def test_pathological_replies(text):
    drafts,state = LLMDrafts(ScriptedLLM([text, text])).generate(DraftState(), 'Who?', 1)
    assert [d.sub_question for d in drafts]==['Who?'] and len(state.why)<500

def test_random_conversations_stay_within_bounds():
    "Hundreds of turns: the prompt never grows beyond its limit, every number is right, every reference is kept."
    rnd = random.Random(0)
    def said(p):
        k = json.loads(p[1]['content'])['first_step']
        return ONE if k==1 else plan(*((f'Who knows [A_{rnd.randint(1, k-1)}] '+'so '*rnd.randint(0, 40), 'x', ()) for _ in range(rnd.randint(1, 8))))
    model = ScriptedLLM(said)
    g = LLMDrafts(model, chars=6000, history=3)
    state,k = g.start(),1
    for t in range(300):
        drafts,state = g.generate(state, f'Question {t} '+'about <s> '*rnd.randint(0, 300), k)
        k += len(drafts)
        asked = json.loads(model.calls[-1].prompt[1]['content'])
        assert len(model.calls[-1].prompt[1]['content']) < len(quoted(asked['message']))+2*6000
        shown = [*asked.get('older_steps', {}), *(s for e in asked['earlier'] for s in e['steps'])]
        assert shown==[f'[A_{i}]' for i in range(asked['first_step']-len(shown), asked['first_step'])], 'what is shown is the newest, without a gap'
        assert sum(len(x.steps) for x in state.turns)+state.dropped==k-1 and len(asked['earlier'])<=3
    assert account(state)==(300, 0, 0) and state.dropped>500

# --- in a session

@pytest.fixture(scope='module')
def corpus(): return world_source('dev', size='tiny').corpus

def planner(p):
    "Plans by first_step, so that the same turn gets the same plan however often it is asked."
    d = json.loads(p[1]['content'])
    if d['message']=='Thanks!': return '{"traces": []}'
    if d['message']=='Break!': return 'no plan'
    k = d['first_step']
    return plan((f'Which place is {d["message"]}?', 'place', ()), (f'Who lives in [A_{k}]?', '', ())) if k==1 else plan((f'What of [A_{k-1}] and [A_1]?', '', ()))

def new(corpus):
    "A session whose planner is scripted, and whose reader answers with the question's first words."
    reader = Reader(ScriptedLLM(lambda p: p[-1]['content'].split('Question: ')[-1][:30]), prompt='chat')
    return Session(LLMDrafts(ScriptedLLM(planner)), Retriever(Index.build(corpus, HashEncoder(64)), corpus), reader)

def outcome(t): return t.answer,t.nodes,t.context,t.calls,t.replies,t.notes

def test_a_conversation(corpus):
    s = new(corpus)
    turns = [s.ask(q) for q in ('Upper Lune', 'And her mother?', 'Thanks!', 'Break!', 'And then?')]
    assert [[n.id for n in t.nodes] for t in turns]==[[1,2], [3], [4], [5], [6]]
    assert turns[1].nodes[0].deps==(2,1) and turns[4].nodes[0].deps==(5,1) and '[A_' not in turns[4].nodes[0].sub_question
    assert [bool(t.notes) for t in turns]==[False, False, True, True, False]
    assert 'small talk' in turns[2].notes[0] and 'no JSON object' in turns[3].notes[0]
    assert account(s.states[-1])==(3, 0, 2) and all(t.answer for t in turns)

def test_fork_undo_and_restore(corpus):
    s = new(corpus)
    turns = [s.ask(q) for q in ('Upper Lune', 'Break!', 'And her mother?')]
    forked = s.fork(1)
    assert account(forked.states[-1])==(1,0,0) and account(s.states[-1])==(2,0,1)
    assert [outcome(forked.ask(q)) for q in ('Break!', 'And her mother?')]==[outcome(t) for t in turns[1:]] and forked.states==s.states
    for _ in range(2): s.undo()
    assert account(s.states[-1])==(1,0,0)
    assert outcome(s.ask('Break!'))==outcome(turns[1])
    dumped = [json.loads(json.dumps(forked.generator.dump(x))) for x in forked.states[1:]]
    back = new(corpus)
    back.restore(forked.turns, dumped)
    assert back.states==forked.states and outcome(back.ask('On?'))==outcome(forked.ask('On?'))

def test_an_unreachable_model_leaves_the_session_as_it_was(corpus):
    s = new(corpus)
    s.ask('Upper Lune')
    ok = s.generator.llm.script
    def down(p): raise LLMError('gave up') from ConnectionError()
    s.generator.llm.script = down
    with pytest.raises(LLMError, match='gave up'): s.ask('And her mother?')
    assert len(s.turns)==1 and len(s.states)==2 and len(s.dag)==2
    s.generator.llm.script = ok
    assert [n.id for n in s.ask('And her mother?').nodes]==[3]
    with pytest.raises(GeneratorError, match='empty'): s.ask('  ')

def test_without_carried_state(corpus):
    s = new(corpus)
    s.carry_state = False
    s.ask('Upper Lune')
    assert [n.deps for n in s.ask('And her mother?').nodes]==[(2,1)] and account(s.states[-1])==(1,0,0)
    assert json.loads(s.generator.llm.calls[-1].prompt[1]['content'])['earlier']==[]
