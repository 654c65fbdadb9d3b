// Lets the search of the built site work when its pages are read from disk, where browsers refuse workers:
// the worker's script runs in a hidden frame instead. The theme would load such a script from the network.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inner = (this.inner = frame.contentWindow);
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (src) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script");
          script.onload = resolve;
          script.onerror = reject;
          script.src = src;
          inner.document.head.appendChild(script);
        });
      inner.importScripts = (...urls) => urls.reduce((before, src) => before.then(() => load(src)), Promise.resolve());
      this.loaded = load(url);
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
